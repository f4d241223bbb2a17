"""`mlxd serve --detach`: a server that outlives its command, or a start that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from mlxd import Client
from mlxd_controller.cli.background.detaching import LOOK_S, answers, default_log
from mlxd_controller.cli.commands.serving.serve import LISTENING
from tests.support.cli import LIMIT_S, Ran, mlxd, start
from tests.support.ports import own_port


@asynccontextmanager
async def detaching(*options: str, address: str, log: Path) -> AsyncIterator[tuple[Ran, int]]:
    """Detach a server around the body; yields how its command ended, and the server's id."""
    ran = await mlxd("serve", "--detach", "--address", address, "--log-file", str(log), *options)
    assert ran.code == 0, ran.err
    lines = dict(line.rpartition(" ")[::2] for line in ran.out.splitlines())
    process = psutil.Process(int(lines["pid"]))
    try:
        yield ran, process.pid
    finally:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(wait_ended, process)


@pytest.mark.asyncio
async def test_a_server_goes_on_when_its_command_has_left(tmp_path: Path) -> None:
    """It takes requests then; address, id and log are told; a second one is refused."""
    log = tmp_path / "a" / "log"
    with own_port() as address:
        await check_detached(address, log)
    assert '"event": "stopped"' in log.read_text(encoding="utf-8")


def mode_of(path: Path) -> int:
    """Who may read and write a file."""
    return path.stat().st_mode & 0o777


async def check_detached(address: str, log: Path) -> None:
    """Detach a server, use it, and try to start another."""
    async with detaching(address=address, log=log) as (ran, pid):
        assert ran.out.splitlines() == [f"{LISTENING}{address}", f"pid {pid}", f"log {log}"]
        async with Client(address) as client:
            assert await client.healthy()
            assert (await client.status()).pid == pid
        assert os.getsid(pid) == pid
        assert mode_of(log) == 0o600
        second = await mlxd("serve", "-d", "--address", address, "--log-file", str(log))
        assert (second.code, second.out) == (1, "")
        assert second.err == f"mlxd: a server answers at {address} already\n"


@pytest.mark.asyncio
async def test_the_port_that_the_system_chose_and_the_gateway_s_are_told(tmp_path: Path) -> None:
    """Whatever stands in the log before this start."""
    log = tmp_path / "log"
    log.write_text(f"{LISTENING}of another day\n", encoding="utf-8")
    options = ("--http", "127.0.0.1:0")
    async with detaching(*options, address="127.0.0.1:0", log=log) as (ran, _):
        listening, gateway, *_ = ran.out.splitlines()
        assert answers(listening.removeprefix(LISTENING))
        assert answers(gateway.rpartition("//")[2])


@pytest.mark.asyncio
async def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """With the server's own code and its last lines; what can be refused before, is."""
    log = tmp_path / "log"
    options = ("serve", "--detach", "--log-file", str(log), "--address", "127.0.0.1:0")
    failed = await mlxd(*options, "--preload", "nobody")
    assert (failed.code, failed.out) == (3, "")
    assert "no model 'nobody'" in failed.err
    assert failed.err.endswith(f"mlxd: the server did not start; its log is {log}\n")
    for more, problem in (
        (("--model", "/nowhere/at/all"), "is not a folder"),
        (("--address", "nonsense"), "is not"),
    ):
        assert problem in (await mlxd(*options, *more)).err
    alone = await mlxd("serve", "--log-file", str(log))
    assert (alone.code, alone.err) == (2, "mlxd: --log-file needs --detach\n")
    unwritable = await mlxd(*options[:2], "--log-file", str(tmp_path), "--address", "127.0.0.1:0")
    assert (unwritable.code, "cannot be written" in unwritable.err) == (2, True)


def wait_ended(process: psutil.Process) -> None:
    """Wait for a process to be gone, or to be what nobody has reaped."""
    looking = threading.Event()
    with suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            looking.wait(LOOK_S)


def first_child(pid: int) -> psutil.Process:
    """Wait for a process to start another."""
    looking = threading.Event()
    while not (children := psutil.Process(pid).children()):
        looking.wait(LOOK_S)
    return children[0]


@pytest.mark.asyncio
async def test_ctrl_c_ends_a_start(tmp_path: Path) -> None:
    """The server that has begun to start goes too."""
    log = tmp_path / "log"
    process = await start(
        *("serve", "--detach", "--log-file", str(log), "--address", "127.0.0.1:0"),
        *("--worker", "w=127.0.0.1:1"),
    )
    async with asyncio.timeout(LIMIT_S):
        server = await asyncio.to_thread(first_child, process.pid)
        process.send_signal(signal.SIGINT)
        await process.wait()
        if process.returncode == 0:  # it served by then
            server.terminate()
        await asyncio.to_thread(wait_ended, server)
    assert process.returncode in {0, 130}


def test_what_answers_is_seen(tmp_path: Path) -> None:
    """A port, every port's loopback, a Unix socket; not a port that is free, nor port 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers(f"127.0.0.1:{port}")
        assert answers(f"0.0.0.0:{port}")
    assert not answers(f"127.0.0.1:{port}")
    assert not answers("127.0.0.1:0")
    path = tmp_path / "s"
    assert not answers(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert answers(f"unix:{path}")


def test_a_log_lies_by_its_server_s_address() -> None:
    """In XDG's folder for state; where the system chooses the port, under one name."""
    state = {"XDG_STATE_HOME": "/s"}
    assert default_log("127.0.0.1:8555", state) == Path("/s/mlxd/127.0.0.1-8555.log")
    assert default_log("127.0.0.1:0", state) == Path("/s/mlxd/mlxd.log")
    home = default_log("127.0.0.1:8555", {"XDG_STATE_HOME": "relative"})
    assert home == Path.home() / ".local/state/mlxd/127.0.0.1-8555.log"
