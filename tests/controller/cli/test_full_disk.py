"""Output that cannot be written: one line on stderr, an exit code, and no traceback."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import COMMAND, LIMIT_S, clean_environment, start
from tests.support.effort import spread_evenly
from tests.support.served import serve

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
SERVE = ("serve", "--address", "127.0.0.1:0", "--log-format", "json")


@contextmanager
def full() -> Iterator[int]:
    """A descriptor of a disk that takes nothing."""
    descriptor = os.open(FULL, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def run_full(*arguments: str) -> tuple[int | None, str]:
    """Run a command whose stdout is full; return its exit code and what it says on stderr."""
    with full() as descriptor:
        process = await start(*arguments, stdout=descriptor)
    _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, err.decode()


ALONE = ("--help", "--version", "version", "serve --help", "fit --help", "generate --help")


@pytest.mark.asyncio
@pytest.mark.parametrize("arguments", spread_evenly(ALONE, 3))
async def test_a_full_disk_behind_stdout_is_one_line(arguments: str) -> None:
    """What needs no server says what it could not write, and fails."""
    assert await run_full(*arguments.split()) == (
        1,
        "mlxd: the output cannot be written: No space left on device\n",
    )


@pytest.mark.asyncio
async def test_commands_with_a_server_fail_in_one_line() -> None:
    """So do those that ask a server, in tables, streams and progress."""
    async with serve() as server:
        for arguments in ("ps", "models", "fit demo", "status", "generate demo once"):
            code, err = await run_full("--address", server.address, *arguments.split())

            assert code == 1, (arguments, err)
            assert "mlxd: the output cannot be written: No space left on device\n" in err
            assert "Traceback" not in err


@pytest.mark.asyncio
async def test_a_server_that_cannot_say_where_it_listens_stops() -> None:
    """Whoever started it could not find it: it ends, in one line beside its log."""
    code, err = await run_full(*SERVE)

    assert code == 1
    assert "mlxd: the output cannot be written: No space left on device\n" in err
    assert "Traceback" not in err


@pytest.mark.asyncio
async def test_a_log_on_a_full_disk_keeps_nobody_from_serving() -> None:
    """Lines are lost, the server is not: it says where it listens, and stops with code 0."""
    with full() as descriptor:
        process = await start(*SERVE, stderr=descriptor)
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
    assert line.startswith(b"mlxd listens on ")

    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0


@pytest.mark.asyncio
async def test_an_error_without_a_place_for_it_keeps_its_exit_code() -> None:
    """Where stderr is full as well, the exit code still tells."""
    with full() as descriptor:
        process = await start("--address", "unix:/none", "ps", stderr=descriptor)
    await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert process.returncode == 4


@pytest.mark.asyncio
async def test_a_run_directory_on_a_full_disk_is_refused() -> None:
    """A disk that takes no byte, which a limit of this process stands for, is named in one line."""
    with tempfile.TemporaryDirectory(prefix="mlxd-") as folder:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *COMMAND, *SERVE, "--run-dir", folder),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_environment(),
        )
        _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert process.returncode == 2
    assert err.decode().count("\n") == 1
    assert "cannot be written: File too large" in err.decode()
