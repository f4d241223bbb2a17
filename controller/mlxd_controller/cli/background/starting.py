"""A server that is started because a command needs one and none answers.

Invariants:
- Only on this machine, and only where a plain client reaches it: what answers elsewhere, or with
  TLS, is somebody's configuration, and not for a command to guess.
- Never without a word, and never where the user has switched it off.
- Of several commands that need one at once, one starts it and the others wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import typer

from mlxd_controller.cli.background.detaching import answers
from mlxd_controller.cli.outcome import ExitCode, complain, leave
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.state import state_folder
from mlxd_shared.config import DETACHED_START_S
from mlxd_shared.ops.state_file import writing_alone
from mlxd_shared.security.net import parse_address

LOCK_FILE = "start.lock"
MARGIN_S = 30.0
"""For the command that starts it to begin and end, beside the server's own DETACHED_START_S."""


def ensure_server(where: Server) -> None:
    """Start a server in the background where one is needed, may be started, and none answers.

    Raises:
        InvalidRequest: the address is none.
        typer.Exit: a server was started and does not serve.
    """
    if not _may_start(where) or answers(where.address):
        return
    folder = state_folder(os.environ)
    with ExitStack() as held:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(writing_alone(folder, LOCK_FILE))
        except OSError as error:
            leave(
                f"{folder}: cannot be written, so no server is started: {error.strerror}",
                ExitCode.ERROR,
            )
        if not answers(where.address):  # nobody else has started it meanwhile
            _start(where)


def _may_start(where: Server) -> bool:
    """Return whether a server that is started could be reached as the command was told.

    Raises:
        InvalidRequest: the address is none.
    """
    address = parse_address(where.address)
    security = where.security
    has_tls = security.tls_ca or security.tls_cert or security.tls_key
    any_port = not address.is_unix and int(address.target.rpartition(":")[2]) == 0
    return address.loopback and not has_tls and not any_port


def _start(where: Server) -> None:
    """Start a server, and wait until it serves.

    Raises:
        typer.Exit: it does not serve.
    """
    complain(
        f"no server answers at {where.address}: starting one in the background"
        " (`--no-start`, or MLXD_START=false, starts none)"
    )
    token_file = where.security.token_file
    token = ["--token-file", str(token_file)] if token_file else []
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
    if started.returncode and not answers(where.address):  # by hand, say, at the same moment
        leave("the server could not be started; see the lines above", _code(started.returncode))
    log = next((line for line in started.stdout.splitlines() if line.startswith("log ")), "")
    typer.echo(f"mlxd: serving; {log}" if log else "mlxd: serving", err=True)


def _code(returncode: int) -> ExitCode:
    return ExitCode(returncode) if returncode in set(ExitCode) else ExitCode.ERROR
