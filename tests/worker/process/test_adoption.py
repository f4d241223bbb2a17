"""A real worker whose controller is gone: it serves for a grace, and follows who adopts it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mlxd.v1 import worker_pb2
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, ShuttingDown
from mlxd_shared.ops.known_process import ProcessMark, mark_of
from mlxd_worker.process.exit_code import ExitCode
from tests.support.calls import endless, error_of, greedy, ids
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import STOP_S_MAX, WorkerProcess, running_worker

LONG_CONTEXT = 32_768
GRACE = "4"
"""In seconds: so much longer than what is done meanwhile that no stall of the machine matters."""
FOR_EVER = "600"


@pytest.fixture(name="folder", scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long streams."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=LONG_CONTEXT)


@asynccontextmanager
async def another_controller() -> AsyncIterator[tuple[asyncio.subprocess.Process, ProcessMark]]:
    """A process that stands for the controller that comes next, and its mark."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    mark = mark_of(process.pid)
    assert mark is not None
    try:
        yield process, mark
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def adopt(worker: WorkerProcess, mark: ProcessMark, output_path: str = "") -> None:
    """Have the worker follow this controller."""
    await worker.control.Adopt(
        worker_pb2.AdoptRequest(
            worker_incarnation=worker.incarnation,
            controller_pid=mark.pid,
            controller_start=mark.start,
            output_path=output_path,
        )
    )


async def start_refused(
    worker: WorkerProcess, mark: ProcessMark, output_path: str = ""
) -> MlxdError:
    """Return why the worker does not."""
    return await error_of(adopt(worker, mark, output_path))


@pytest.mark.asyncio
async def test_an_orphan_serves_for_its_grace(folder: Path) -> None:
    """With its model ready it takes streams as before; then it drains and ends."""
    async with running_worker("--orphan-grace", GRACE, "--stop-grace", FOR_EVER) as worker:
        await worker.load(folder)
        before = await ids(worker)
        worker.life.close()
        while "the controller is gone" not in worker.log:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await ids(worker) == before
        messages = [m async for m in worker.inference.Generate(greedy(max_tokens=2500))]
        assert messages[-1].usage.completion_tokens == 2500
        assert await worker.wait_ended() == ExitCode.OK


@pytest.mark.asyncio
async def test_an_orphan_without_a_ready_model_ends_at_once() -> None:
    """There is nothing that another controller could take over."""
    async with running_worker("--orphan-grace", FOR_EVER) as worker:
        worker.life.close()
        assert await worker.wait_ended() == ExitCode.OK


@pytest.mark.asyncio
async def test_who_adopts_a_worker_is_followed(folder: Path, tmp_path: Path) -> None:
    """It outlives the grace, writes to the new pipe, and notices this one's end as the first's."""
    pipe = tmp_path / "out"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    async with (
        running_worker("--orphan-grace", GRACE, "--log-format", "json") as worker,
        another_controller() as (process, mark),
    ):
        await worker.load(folder)
        worker.life.close()
        await adopt(worker, mark, str(pipe))
        await adopt(worker, mark)  # again is no change
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.process.wait(), float(GRACE) + 0.5)
        assert len(await ids(worker)) == 10

        process.kill()
        await process.wait()
        assert await worker.wait_ended() == ExitCode.OK
        os.set_blocking(reader, True)
        with os.fdopen(reader) as output:
            said = output.read()
    assert said.index('"adopted"') < said.index('"the controller is gone"')


@pytest.mark.asyncio
async def test_a_controller_that_lives_is_not_left_for_another(folder: Path) -> None:
    """Nor is a process followed that is not the one that is meant, or has ended."""
    async with (
        running_worker("--orphan-grace", FOR_EVER) as worker,
        another_controller() as (process, mark),
        another_controller() as (_, other),
    ):
        await worker.load(folder)
        error = await start_refused(worker, mark)
        assert isinstance(error, InvalidRequest)
        assert "lives" in error.describe()
        worker.life.close()
        for wrong in (ProcessMark(mark.pid, other.start + "0"), ProcessMark(0, "")):
            assert isinstance(await start_refused(worker, wrong), InvalidRequest)
        await adopt(worker, mark)
        assert isinstance(await start_refused(worker, other), InvalidRequest)
        process.kill()
        await process.wait()
        assert isinstance(await start_refused(worker, mark), InvalidRequest)
        await adopt(worker, other)
        assert len(await ids(worker)) == 10


@pytest.mark.asyncio
async def test_output_goes_to_a_pipe_with_a_reader_only(folder: Path, tmp_path: Path) -> None:
    """A file, a link, a path that is not there, a pipe that nobody reads: refused by name."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "unread")
    async with (
        running_worker("--orphan-grace", FOR_EVER) as worker,
        another_controller() as (_, mark),
    ):
        await worker.load(folder)
        worker.life.close()
        for name in ("file", "link", "missing", "unread"):
            error = await start_refused(worker, mark, str(tmp_path / name))
            assert isinstance(error, InvalidRequest)
            assert [v.field for v in error.violations] == ["output_path"]
        await adopt(worker, mark)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.asyncio
async def test_a_worker_that_is_stopping_is_not_adopted(folder: Path) -> None:
    """It is on its way out, whoever comes."""
    async with (
        running_worker("--orphan-grace", FOR_EVER, "--stop-grace", str(STOP_S_MAX)) as worker,
        another_controller() as (_, mark),
    ):
        await worker.load(folder)
        call = await endless(worker)
        worker.life.close()
        request = worker_pb2.ShutdownRequest(worker_incarnation=worker.incarnation)
        await worker.control.Shutdown(request)
        assert isinstance(await start_refused(worker, mark), ShuttingDown)
        call.cancel()
        assert await worker.wait_ended() == ExitCode.OK
