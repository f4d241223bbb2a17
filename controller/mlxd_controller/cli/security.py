"""TLS and the token on the command line: of the client commands, and of `mlxd serve`.

The files are named here and read where they are used, so that a bad one is an error of one kind
whoever runs into it. A token itself is never an argument: command lines are for all to see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from mlxd import Client
from mlxd_controller.cli.options import Address, given_flags
from mlxd_controller.cli.outcome import usage_error
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.listeners import ListenerFiles
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity

Named: TypeAlias = tuple[str, str]
PANEL = "Security"
WORKER_PANEL = "Workers that run already"
TLS_OPTIONS = ("tls_ca", "tls_cert", "tls_key")


def _file(help_text: str, panel: str = PANEL) -> Any:  # noqa: ANN401 - typer's own
    return typer.Option(help=help_text, rich_help_panel=panel)


TlsCa = Annotated[
    Path | None, _file("Use TLS; the authorities that signed the server's certificate, as PEM.")
]
TlsCert = Annotated[Path | None, _file("The client's certificate, for servers that require one.")]
TlsKey = Annotated[Path | None, _file("The key of --tls-cert, as PEM.")]
TokenFile = Annotated[Path | None, _file("A file with the token that the server requires.")]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client command shows, and whom it trusts, before the command.

    Only these read the environment, so that no flag loses to it.
    """

    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    token_file: TokenFile = None


@dataclass(frozen=True, slots=True)
class Reach:
    """The server that a command is for, and how to reach it, after the command."""

    address: Address = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    token_file: TokenFile = None


@dataclass(frozen=True, slots=True)
class Server:
    """The server that a command is for, and how to reach it."""

    address: str
    security: ChannelSecurity
    flags: Mapping[str, str] = field(default_factory=dict)
    """What the command was given, see `given_flags`: what an error about a field speaks of."""

    def client(self, *, timeout_s: float = config.CLIENT_TIMEOUT_S) -> Client:
        """Return a client of it, not yet entered."""
        return Client(self.address, security=self.security, timeout_s=timeout_s)


def server(context: typer.Context, own: Reach) -> Server:
    """Return the server that the options name: each after the command, else before it."""
    nearest = {name: value for name, value in asdict(own).items() if value is not None}
    options = {name: context.find_root().params[name] for name in asdict(own)} | nearest
    address: str = options.pop("address")
    return Server(address, ChannelSecurity(**options), given_flags(context))


@dataclass(frozen=True, slots=True)
class Listener:
    """How `mlxd serve` protects what it listens on."""

    tls_cert: Annotated[Path | None, _file("Serve TLS: the server's certificates as PEM.")] = None
    tls_key: TlsKey = None
    tls_client_ca: Annotated[
        Path | None,
        _file("Serve only clients with a certificate that these authorities signed."),
    ] = None
    token_file: Annotated[
        Path | None,
        _file("Serve only clients that send the token in this file.  [env var: MLXD_TOKEN_FILE]"),
    ] = None
    keys_file: Annotated[
        Path | None,
        _file(
            "Serve clients that send a key of this file, within its scopes and limits; see"
            " `mlxd keys`."
        ),
    ] = None
    open_health: Annotated[
        bool,
        typer.Option(
            "--open-health",
            help="Answer health checks without the token or a key.",
            rich_help_panel=PANEL,
        ),
    ] = False

    def files(self, context: typer.Context) -> ListenerFiles:
        """Return what `mlxd serve` was given; a token file before the command is good too.

        Raises:
            typer.Exit: a client's TLS option stands before the command, where it says nothing.
        """
        root = context.find_root()
        for name in TLS_OPTIONS:
            source = root.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                flag = "--" + name.replace("_", "-")
                usage_error(f"{flag} before the command is a client's; see `mlxd serve --help`")
        token = self.token_file or root.params["token_file"]
        return ListenerFiles(
            self.tls_cert, self.tls_key, self.tls_client_ca, token, self.open_health, self.keys_file
        )


@dataclass(frozen=True, slots=True)
class GatewayListener:
    """How `mlxd gateway` protects what it listens on."""

    listen_tls_cert: Annotated[
        Path | None, _file("Serve TLS: the gateway's certificates as PEM.")
    ] = None
    listen_tls_key: Annotated[Path | None, _file("The key of --listen-tls-cert, as PEM.")] = None
    listen_tls_client_ca: Annotated[
        Path | None,
        _file("Serve only clients with a certificate that these authorities signed."),
    ] = None
    listen_token_file: Annotated[
        Path | None, _file("Serve only clients that send the token in this file.")
    ] = None
    pass_keys: Annotated[
        bool,
        typer.Option(
            "--pass-keys",
            help="Pass the keys that clients send on to the server, which judges them.",
            rich_help_panel=PANEL,
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class Attached:
    """Workers that run already, and how to reach them."""

    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ADDRESS",
            help="Use this worker instead of starting processes; repeatable. It loads and unloads"
            " models, and is never ended.",
            rich_help_panel=WORKER_PANEL,
        ),
    ] = None
    worker_tls_ca: Annotated[
        Path | None,
        _file(
            "Reach workers over TLS; the authorities that signed their certificates.", WORKER_PANEL
        ),
    ] = None
    worker_tls_cert: Annotated[
        Path | None, _file("The certificate to show to workers.", WORKER_PANEL)
    ] = None
    worker_tls_key: Annotated[Path | None, _file("The key of --worker-tls-cert.", WORKER_PANEL)] = (
        None
    )
    worker_token_file: Annotated[
        Path | None, _file("A file with the token that workers require.", WORKER_PANEL)
    ] = None

    @property
    def channel(self) -> ChannelSecurity:
        """How they are reached."""
        return ChannelSecurity(
            self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key, self.worker_token_file
        )


def named_workers(texts: list[str] | None, security: ChannelSecurity) -> tuple[Named, ...]:
    """Read each NAME=ADDRESS; names and addresses are unique.

    Raises:
        typer.Exit: one is none of that, or `security` is for workers that are not named.
    """
    if not texts and security != PLAIN:
        usage_error("--worker-tls-* and --worker-token-file need --worker")
    workers: list[Named] = []
    for text in texts or ():
        name, equals, address = text.partition("=")
        if not equals or not name:
            usage_error(f"--worker {text}: write NAME=ADDRESS")
        try:
            target = parse_address(address).target
        except InvalidRequest as error:
            usage_error(f"--worker {text}: {error.describe()}")
        if any(name == known or target == at for known, at in workers):
            usage_error(f"--worker {text}: its name or address is given twice")
        workers.append((name, target))
    return tuple(workers)
