"""TLS and the token on the command line: of the client commands, and of `mlxd serve`.

The files are named here and read where they are used, so that a bad one is an error of one kind
whoever runs into it. A token itself is never an argument: command lines are for all to see.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mlxd import Client
from mlxd_controller.cli.options import server_address
from mlxd_controller.cli.outcome import usage_error
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.listeners import ListenerFiles
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity

Named: TypeAlias = tuple[str, str]
PANEL = "Security"
TLS_OPTIONS = ("tls_ca", "tls_cert", "tls_key")

TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="MLXD_TLS_CA",
        help="Use TLS; the authorities that signed the server's certificate, as PEM.",
        rich_help_panel=PANEL,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="MLXD_TLS_CERT",
        help="The client's certificate, for servers that require one.",
        rich_help_panel=PANEL,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        envvar="MLXD_TLS_KEY", help="The key of --tls-cert, as PEM.", rich_help_panel=PANEL
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="MLXD_TOKEN_FILE",
        help="A file with the token that the server requires.",
        rich_help_panel=PANEL,
    ),
]

ServeCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", help="Serve TLS: the server's certificates as PEM.", rich_help_panel=PANEL
    ),
]
ServeKey = Annotated[
    Path | None,
    typer.Option("--tls-key", help="The key of --tls-cert, as PEM.", rich_help_panel=PANEL),
]
ServeClientCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca",
        help="Serve only clients with a certificate that these authorities signed.",
        rich_help_panel=PANEL,
    ),
]
ServeTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="Serve only clients that send the token in this file.  [env var: MLXD_TOKEN_FILE]",
        rich_help_panel=PANEL,
    ),
]
OpenHealth = Annotated[
    bool,
    typer.Option(
        "--open-health",
        help="Answer health checks without the token.",
        rich_help_panel=PANEL,
    ),
]


WORKER_PANEL = "Workers that run already"
Workers = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="NAME=ADDRESS",
        help="Use this running worker instead of starting one; repeatable. mlxd never ends it.",
        rich_help_panel=WORKER_PANEL,
    ),
]
WorkerTlsCa = Annotated[
    Path | None,
    typer.Option(
        "--worker-tls-ca",
        help="Reach workers over TLS; the authorities that signed their certificates.",
        rich_help_panel=WORKER_PANEL,
    ),
]
WorkerTlsCert = Annotated[
    Path | None,
    typer.Option(
        "--worker-tls-cert",
        help="The certificate to show to workers.",
        rich_help_panel=WORKER_PANEL,
    ),
]
WorkerTlsKey = Annotated[
    Path | None,
    typer.Option(
        "--worker-tls-key", help="The key of --worker-tls-cert.", rich_help_panel=WORKER_PANEL
    ),
]
WorkerTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--worker-token-file",
        help="A file with the token that workers require.",
        rich_help_panel=WORKER_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Server:
    """The server that a command is for, and how to reach it."""

    address: str
    security: ChannelSecurity

    def client(self, *, timeout_s: float = config.CLIENT_TIMEOUT_S) -> Client:
        """Return a client of it, not yet entered."""
        return Client(self.address, security=self.security, timeout_s=timeout_s)


def server(context: typer.Context, own_address: str | None) -> Server:
    """Return the server that the options before and after the command name."""
    given = context.find_root().params
    files = {name: given[name] for name in (*TLS_OPTIONS, "token_file")}
    return Server(server_address(context, own_address), ChannelSecurity(**files))


def listener_files(
    context: typer.Context,
    *,
    cert: Path | None,
    key: Path | None,
    client_ca: Path | None,
    token_file: Path | None,
    open_health: bool,
) -> ListenerFiles:
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
    token = token_file or root.params["token_file"]
    return ListenerFiles(cert, key, client_ca, token, open_health)


def named_workers(texts: list[str] | None, security: ChannelSecurity) -> tuple[Named, ...]:
    """Read each NAME=ADDRESS; names and addresses are unique.

    Raises:
        typer.Exit: one is none of that, or `security` is for workers that are not named.
    """
    if not texts and security != PLAIN:
        usage_error("--worker-tls-* and --worker-token-file need --worker")
    found: list[Named] = []
    for text in texts or ():
        name, equals, address = text.partition("=")
        if not equals or not name:
            usage_error(f"--worker {text}: write NAME=ADDRESS")
        try:
            target = parse_address(address).target
        except InvalidRequest as error:
            usage_error(f"--worker {text}: {error.describe()}")
        if any(name == known or target == at for known, at in found):
            usage_error(f"--worker {text}: its name or address is given twice")
        found.append((name, target))
    return tuple(found)
