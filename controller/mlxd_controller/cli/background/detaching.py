"""`mlxd serve --detach`: the same command in a session of its own, watched until it serves.

Invariants:
- Nothing is started where something answers already, and nothing is left where the start fails.
- What the server writes goes to one file, which only its user reads; it outlives the terminal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import typer

from mlxd_controller.cli.outcome import ExitCode, complain, leave, run, usage_error
from mlxd_controller.cli.state import state_folder
from mlxd_controller.cli.terminal.show import log_line
from mlxd_controller.launcher.run_dir import name_of
from mlxd_shared.config import DETACHED_START_S, MIB
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.terminal import escape
from mlxd_shared.security.net import parse_address

DETACHED_VARIABLE = "MLXD_DETACHED"
"""Set for the server itself, which has the same command line."""
CONNECT_S = 2.0
LOOK_S = 0.05
STOP_S = 20.0
TAIL_LINES = 15
LOG_BYTES_LOOKED_AT = MIB
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where others listen


def default_log(address: str, environment: Mapping[str, str]) -> Path:
    """Return the log of a server at an address: in the folder for state (XDG), by its name."""
    return state_folder(environment) / f"{name_of(address) or 'mlxd'}.log"


def detach(address: str, *, log: Path | None, announced: Sequence[str]) -> NoReturn:
    """Start this very command once more, in the background, and leave when it serves.

    log: where its output goes; None is the default of its address. announced: what the lines begin
    with by which it says that it serves, all of them.

    Raises:
        typer.Exit: always; with the server's own code where it has ended.
    """
    try:
        if answers(address):
            leave(f"a server answers at {address} already", ExitCode.ERROR)
        path = (log or default_log(address, os.environ)).expanduser().absolute()
    except InvalidRequest as error:
        usage_error(error.describe())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        usage_error(f"{path}: cannot be written: {error.strerror}")
    run(_serve(path, output, announced), address=address)


def answers(address: str) -> bool:
    """Return whether something listens at an address of this machine; at port 0 nobody does.

    Raises:
        InvalidRequest: it is no address.
    """
    wanted = parse_address(address)
    host, _, port = wanted.target.rpartition(":")
    try:
        if wanted.is_unix:
            with socket.socket(socket.AF_UNIX) as caller:
                caller.settimeout(CONNECT_S)
                caller.connect(str(wanted.path))
        elif int(port) == 0:
            return False
        else:
            host = host.strip("[]")
            where = (_LOOPBACK.get(host, host), int(port))
            socket.create_connection(where, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


async def _serve(log: Path, output: int, announced: Sequence[str]) -> ExitCode:
    """Start the server, which writes to `output`; return when it serves, or has ended."""
    begin = os.fstat(output).st_size
    process = _start(output)
    try:
        async with asyncio.timeout(DETACHED_START_S):
            while process.poll() is None:
                lines = _read_lines(log, begin)
                said = [line for line in lines if line.startswith(tuple(announced))]
                if len(said) >= len(announced):
                    typer.echo("\n".join([*said, f"pid {process.pid}", f"log {log}"]))
                    return ExitCode.OK
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        complain(f"the server does not serve after {DETACHED_START_S:.0f} s")
    except asyncio.CancelledError:  # Ctrl-C
        _end(process)
        raise
    code = _end(process)
    for line in _read_lines(log, begin)[-TAIL_LINES:]:
        typer.echo(escape(log_line(line)), err=True)
    complain(f"the server did not start; its log is {log}")
    return ExitCode(code) if code in set(ExitCode) - {ExitCode.OK} else ExitCode.ERROR


def _start(output: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mlxd_controller.cli", *sys.argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, DETACHED_VARIABLE: "1"},
        )
    finally:
        os.close(output)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a server that does not serve, if it lives; return its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read_lines(log: Path, begin: int) -> list[str]:
    """Return the whole lines from a place of the file on."""
    with log.open("rb") as file:
        file.seek(begin)
        whole, _, _ = file.read(LOG_BYTES_LOOKED_AT).rpartition(b"\n")
    return whole.decode(errors="replace").splitlines()
