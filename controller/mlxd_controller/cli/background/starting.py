"""A server that is started because a command needs one and none answers.

Invariants:
- Only on this machine, and only where a plain client reaches it: what answers elsewhere, or with
  TLS, is somebody's configuration, and not for a command to guess.
- Never without a word, and never where the user has switched it off.
"""

from __future__ import annotations

import subprocess
import sys

import typer

from mlxd_controller.cli.outcome import ExitCode, complain, leave
from mlxd_controller.cli.security import Server
from mlxd_shared.config import DETACHED_START_S
from mlxd_shared.security.net import parse_address

MARGIN_S = 30.0
"""For the command that starts it to begin and end, beside the server's own DETACHED_START_S."""


def ensure_server(where: Server) -> None:
    """Start a server in the background where one is needed, may be started, and none answers.

    Raises:
        InvalidRequest: the address is none.
        typer.Exit: a server was started and does not serve.
    """
    # Imported here: most commands start nothing, and are over in the time that it takes.
    from mlxd_controller.cli.background.detaching import answers  # noqa: PLC0415

    security = where.security
    has_tls = security.tls_ca or security.tls_cert or security.tls_key
    if not parse_address(where.address).loopback or has_tls or answers(where.address):
        return
    complain(
        f"no server answers at {where.address}: starting one in the background"
        " (`--no-start`, or MLXD_START=false, starts none)"
    )
    token = ["--token-file", str(security.token_file)] if security.token_file else []
    try:
        started = subprocess.run(
            [sys.executable, "-m", "mlxd_controller.cli", "serve", "--detach",
             "--address", where.address, *token],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False,
            timeout=DETACHED_START_S + MARGIN_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        complain("the server does not serve yet")
        return
    if started.returncode and not answers(where.address):  # of two that start one, one is second
        leave("the server could not be started; see the lines above", _code(started.returncode))
    log = next((line for line in started.stdout.splitlines() if line.startswith("log ")), "")
    typer.echo(f"mlxd: serving; {log}" if log else "mlxd: serving", err=True)


def _code(returncode: int) -> ExitCode:
    return ExitCode(returncode) if returncode in set(ExitCode) else ExitCode.ERROR
