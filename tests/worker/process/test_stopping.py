"""A real worker process alone: its command line, its ready line, and every way to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from mlxd.v1 import status_pb2, types_pb2, worker_pb2
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import (
    InternalError,
    ShuttingDown,
)
from mlxd_shared.security.net import parse_address
from mlxd_worker.app import write_ready
from mlxd_worker.process.exit_code import ExitCode
from tests.support.calls import endless, error_of, greedy, health, ids
from tests.support.faulty_worker import FAULT, STREAMS_VARIABLE
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import (
    STOP_S_MAX,
    Pipe,
    WorkerProcess,
    refused_worker,
    running_worker,
)

LONG_CONTEXT = 32_768
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]], close_fds=False)
sys.stdin.read()
"""
READY_AND_ORPHANED = """
import os
import psutil
from mlxd_worker import __main__, app
say, parent = app.write_ready, psutil.Process(os.getppid())
def say_and_lose_the_parent(fd, line):
    say(fd, line)
    parent.wait()
app.write_ready = say_and_lose_the_parent
__main__.main()
"""
"""A worker that does nothing more after its ready line until its parent has ended."""
SERVICES = ("mlxd.v1.InferenceService", "mlxd.v1.StatusService", "mlxd.v1.WorkerService")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long streams."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=LONG_CONTEXT)


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[WorkerProcess]:
    """A fresh worker without a model."""
    async with running_worker() as process:
        yield process


def is_socket(path: Path) -> bool:
    """Tell whether a Unix socket lies there."""
    return path.is_socket()


def folder_mode(path: Path) -> int:
    """Return the permissions of the folder that holds `path`."""
    return path.parent.stat().st_mode & 0o777


@pytest.mark.asyncio
async def test_a_model_on_the_command_line(folder: Path) -> None:
    """With --model the worker loads by itself, under the digest that its files have."""
    async with running_worker(
        "--model", str(folder), "--name", "mine", "--rows-max", "3",
        "--kv-format", "model", "--prefix-cache", "1.5M",
    ) as worker:  # fmt: skip
        status = await worker.until(lambda s: s.state == types_pb2.MODEL_STATE_READY)
        assert (status.model_name, status.rows_max) == ("mine", 3)
        assert status.kv_format == types_pb2.KV_FORMAT_MODEL
        assert status.prefix_cache_bytes == 3 << 19
        assert status.model_digest == model_digest(folder)
        assert len(await ids(worker)) == 10


@pytest.mark.asyncio
async def test_a_bad_model_on_the_command_line_ends_the_process(tmp_path: Path) -> None:
    """There is nobody else to tell, so the exit code and the log do."""
    async with running_worker("--model", str(tmp_path)) as worker:
        assert await worker.wait_ended() == ExitCode.LOAD_FAILED
        assert "cannot serve the model" in worker.log


@pytest.mark.asyncio
async def test_watchers_end_when_the_process_stops(worker: WorkerProcess) -> None:
    """A status watch ends well at shutdown, which is answered before the process exits with 0."""
    watch = worker.status.WatchStatus(status_pb2.WatchStatusRequest())
    messages = aiter(watch)
    await anext(messages)

    request = worker_pb2.ShutdownRequest(worker_incarnation=worker.incarnation)
    await worker.control.Shutdown(request)

    assert [m async for m in messages] == []
    assert await watch.code() == grpc.StatusCode.OK
    assert await worker.wait_ended() == ExitCode.OK


@pytest.mark.asyncio
async def test_a_signal_lets_short_streams_end(folder: Path) -> None:
    """SIGTERM lets streams end within the grace, tells the others why, and exits with 0."""
    async with running_worker("--stop-grace", "4") as worker:
        await worker.load(folder)
        short = worker.inference.Generate(greedy(max_tokens=100))
        messages = [await anext(aiter(short))]
        # Read from now on, as clients do: a process that has ended sends nothing again.
        ending = asyncio.create_task(error_of(await endless(worker)))

        os.kill(worker.pid, signal.SIGTERM)

        messages += [message async for message in short]
        assert messages[-1].usage.completion_tokens == 100
        assert isinstance(await ending, ShuttingDown)
        assert await worker.wait_ended() == ExitCode.OK


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_idle_worker_stops_at_once(number: signal.Signals) -> None:
    """Either signal ends a worker with nothing to do, well, and leaves no socket behind."""
    async with running_worker() as worker:
        socket = parse_address(worker.address).path
        assert is_socket(socket)
        os.kill(worker.pid, number)
        assert await worker.wait_ended() == ExitCode.OK
        assert not is_socket(socket)


@pytest.mark.asyncio
async def test_a_broken_engine_ends_the_process(folder: Path) -> None:
    """A fault of the loop: every stream is told an id, the log has its cause, the process exits."""
    environ = {STREAMS_VARIABLE: "3"}
    async with running_worker(module="tests.support.faulty_worker", environ=environ) as worker:
        await worker.load(folder)
        calls = [worker.inference.Generate(greedy()) for _ in range(3)]

        errors = await asyncio.gather(*(error_of(call) for call in calls))

        assert await worker.wait_ended() == ExitCode.ENGINE_FAILED
        for error in errors:
            assert isinstance(error, InternalError | ShuttingDown)
        ids_told = {error.error_id for error in errors if isinstance(error, InternalError)}
        assert len(ids_told) == 1
        assert ids_told.pop() in worker.log
        assert FAULT in worker.log


@pytest.mark.asyncio
async def test_an_orphan_ends() -> None:
    """When the controller's end of the pipe closes, the worker ends after its grace."""
    async with running_worker("--orphan-grace", "0.1") as worker:
        worker.life.close()
        assert await worker.wait_ended() == ExitCode.OK
        assert "the controller is gone" in worker.log
        assert not psutil.pid_exists(worker.pid)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "program", [("-m", "mlxd_worker"), ("-c", READY_AND_ORPHANED)], ids=["later", "at once"]
)
async def test_an_orphan_whose_pipe_is_still_held_ends(program: tuple[str, str]) -> None:
    """A leaked end of the pipe keeps no worker alive: its parent's process id tells, too."""
    ready, life = Pipe.make(), Pipe.make()
    fds = (ready.write_fd, life.read_fd)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, *program, "--orphan-grace", "0.1"),
        *("--ready-fd", str(fds[0]), "--life-fd", str(fds[1])),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=fds,
    )
    assert parent.stdin is not None
    assert parent.stderr is not None
    try:
        ready.close(*fds[:1])
        line = await asyncio.to_thread(os.read, ready.read_fd, 4096)
        assert b"address" in line

        parent.stdin.close()
        await asyncio.wait_for(parent.wait(), STOP_S_MAX)
        log = await asyncio.wait_for(parent.stderr.read(), STOP_S_MAX)  # ends with the worker

        assert b"the controller is gone" in log
    finally:
        ready.close()
        life.close()


@pytest.mark.asyncio
async def test_tcp_binds_its_own_port_on_loopback() -> None:
    """Port 0 is chosen by the system and reported; other machines are let in only if told so."""
    async with running_worker(listen="tcp:127.0.0.1:0") as worker:
        port = int(worker.address.rpartition(":")[2])
        assert worker.address == f"127.0.0.1:{port}"
        assert port > 0
        assert await health(worker.channel, "") == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.asyncio
async def test_strangers_are_kept_out() -> None:
    """An address that other machines reach is refused, with the way to allow it."""
    refused = await refused_worker("--listen", "tcp:0.0.0.0:0")
    assert "--allow-remote" in str(refused.line["error"])
    assert refused.code == ExitCode.CANNOT_START


@pytest.mark.asyncio
async def test_two_backends_are_refused(tmp_path: Path) -> None:
    """With a second backend installed the worker says so on its ready pipe and does not start."""
    extra = tmp_path / "mlx_cuda_13-0.32.4.dist-info"
    extra.mkdir()
    (extra / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.32.4\n")

    refused = await refused_worker(environ={"PYTHONPATH": str(tmp_path)})

    assert "mlx-cpu and mlx-cuda-13" in str(refused.line["error"])
    assert refused.line["kind"] == "BackendProblem"
    assert refused.code == ExitCode.CANNOT_START


@pytest.mark.parametrize("value", ["4", "x"])
def test_nonsense_on_the_command_line(value: str) -> None:
    """A bad option is named, before anything is started; no number is as bad as a wrong one."""
    done = subprocess.run(
        [sys.executable, "-m", "mlxd_worker", "--context-length", value],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.BAD_OPTIONS
    assert "context" in done.stderr


@pytest.mark.asyncio
async def test_nothing_of_a_prompt_is_logged(folder: Path) -> None:
    """Prompts and outputs stay out of the log, at every level."""
    async with running_worker("--log-level", "debug") as worker:
        await worker.load(folder)
        call = worker.inference.Generate(greedy(text="zebra crossing", max_tokens=5))
        assert [m async for m in call]
        await error_of(worker.inference.Generate(greedy(text="zebra " * 20_000)))
        assert "zebra" not in worker.log


@pytest.mark.asyncio
async def test_a_socket_in_use_is_left_alone() -> None:
    """A second worker on a live socket is refused, and the first goes on serving there."""
    async with running_worker() as worker:
        refused = await refused_worker("--listen", worker.address)
        assert refused.code == ExitCode.CANNOT_START
        assert refused.line["kind"] == "InvalidRequest"
        assert is_socket(parse_address(worker.address).path)
        assert await health(worker.channel, "") == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.asyncio
async def test_no_address_means_a_private_socket() -> None:
    """Without --listen the worker makes a socket in a folder that only its user can enter."""
    async with running_worker(listen="") as worker:
        path = parse_address(worker.address).path
        assert is_socket(path)
        assert folder_mode(path) == 0o700
        assert await health(worker.channel, "") == health_pb2.HealthCheckResponse.SERVING


def test_a_ready_pipe_that_nobody_reads_is_no_failure() -> None:
    """A launch that was given up ends its worker by a signal, not by an error of the worker's."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    write_ready(write_fd, {"address": "unix:x"})
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)
