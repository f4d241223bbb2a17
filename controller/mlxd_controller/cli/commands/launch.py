"""`mlxd launch`: an agent that finds the gateway, in place of this process."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

import typer

from mlxd_controller import agents
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import spread_groups
from mlxd_controller.cli.http import rest_of_line
from mlxd_controller.cli.outcome import ExitCode, leave, report, usage_error
from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.ops import logs
from mlxd_shared.security.tokens import read_token, secret_in

ANSWER_S = 10.0
"""What a gateway gets to say which models there are."""
ANSWER_BYTES_MAX = 16 * config.MIB
KNOWN_MAX = 8
DEFAULT_URL = f"http://{config.DEFAULT_HTTP_ADDRESS}"


@spread_groups
def launch(
    context: typer.Context,
    agent: Annotated[
        Literal["claude", "codex", "opencode"], typer.Argument(help="The agent to start.")
    ],
    model: Annotated[
        str | None,
        named_model("The model to work with.  [default: what the agent's own names mean]"),
    ] = None,
    *,
    url: Annotated[str, typer.Option(metavar="URL", help="Where the gateway is.")] = DEFAULT_URL,
    tls_ca: Annotated[
        Path | None, typer.Option(help="The authorities that signed its certificate, as PEM.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token or key that it requires.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print what a shell would do, and start nothing.")
    ] = False,
) -> None:
    """Start an agent that works with a model served here. What follows `--` is the agent's own.

    Needs a gateway, such as `mlxd serve --http` starts.
    """
    logs.configure(level="warning")  # on stderr: what is printed is for a shell
    root = context.find_root().params
    tls_ca, token_file = tls_ca or root["tls_ca"], token_file or root["token_file"]
    try:
        key = "" if token_file is None else secret_in(read_token(token_file).header[1])
    except BadCredentials as error:
        raise typer.Exit(report(error, url)) from error
    tool = agents.AGENTS[agent]
    gateway = Gateway(_check_url(url), key, tls_ca)
    target = _aim(tool, model or "", gateway)
    wiring = tool.wire(target)
    line = (tool.program, *wiring.arguments, *rest_of_line(context))
    if show:
        written = (
            agents.NO_KEY if token_file is None else f'"$(cat {shlex.quote(str(token_file))})"'
        )
        typer.echo("\n".join(agents.shell_lines(wiring, line, written)))
        return
    path = shutil.which(tool.program)
    if path is None:
        problem = f"{tool.title} is not installed: no {tool.program} on PATH; see {tool.install}"
        leave(problem, ExitCode.ERROR)
    os.execve(path, line, agents.environment_of(wiring, key, os.environ))  # noqa: S606 - becomes it


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/"):
        usage_error(f"--url {url}: write http://HOST:PORT or https://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


def _aim(tool: agents.Agent, model: str, gateway: Gateway) -> agents.Target:
    """Return what the tool is to talk to; leaves where there is no gateway, or no such model."""
    names = gateway.names()
    known = f"known: {', '.join(names[:KNOWN_MAX])}" if names else "it knows none"
    if model and not gateway.knows(model):
        leave(f"no model {model!r} at {gateway.url}; {known}", ExitCode.NOT_FOUND)
    if not model and tool.own_model and not gateway.knows(tool.own_model):
        pattern = agents.pattern_of(tool.own_model)
        usage_error(
            f"name a model ({known}), or give {tool.title}'s own names one: mlxd alias '{pattern}'"
            " MODEL"
        )
    if not model and not tool.own_model and not names:
        usage_error(f"the gateway at {gateway.url} knows no model: see `mlxd pull`")
    ca_file = "" if gateway.tls_ca is None else str(gateway.tls_ca.expanduser().absolute())
    return agents.Target(gateway.url, model, names, ca_file)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway, as far as it is asked here. Every method ends the command where it is none."""

    url: str
    key: str
    tls_ca: Path | None

    def names(self) -> tuple[str, ...]:
        """Return the names of models on offer."""
        answer = self._get("/v1/models")
        try:
            return tuple(str(entry["id"]) for entry in answer["data"])
        except (KeyError, TypeError):
            leave(f"what answers at {self.url} is no gateway", ExitCode.UNREACHABLE)

    def knows(self, name: str) -> bool:
        """Return whether there is a model of this name, listed or not."""
        return self._get(f"/v1/models/{quote(name, safe='/:@')}") is not None

    def _get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return what is answered; None: it says that there is no such thing."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        where = self.url + path
        request = urllib.request.Request(where, headers=headers)  # noqa: S310 - see _check_url
        try:
            trust = ssl.create_default_context(cafile=self.tls_ca)
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
            )
            with opener.open(request, timeout=ANSWER_S) as response:
                return json.loads(response.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            error.close()
            self._judge(error.code)
            return None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            leave(
                f"no gateway answers at {self.url} ({reason}); start one with"
                " `mlxd serve --http`, or see --url",
                ExitCode.UNREACHABLE,
            )

    def _judge(self, status: int) -> None:
        """Leave over a status that is an error, but for that of what is not there."""
        if status == HTTPStatus.UNAUTHORIZED:
            leave(f"the gateway at {self.url} wants a token: see --token-file", ExitCode.ERROR)
        if status != HTTPStatus.NOT_FOUND:
            leave(f"the gateway at {self.url} answers {status}: see its log", ExitCode.ERROR)
