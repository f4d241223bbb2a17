"""The life of real workers under a real controller: loads, crashes, ends; nothing is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import (
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
)
from mlxd_shared.domain.errors import InvalidModel, ModelUnloaded, WorkerLost
from tests.support.calls import error_of, greedy
from tests.support.served import Served, serve
from tests.support.tiny_model import write_tiny_model

CONTEXT = 16384
"""Long enough that a stream without a limit goes on for as long as a test needs it to."""
READY = types_pb2.MODEL_STATE_READY
UNLOADED = types_pb2.MODEL_STATE_UNLOADED
END_S_MAX = 60.0


@dataclass(slots=True)
class Session:
    """A running controller and a connection to it."""

    server: Served
    channel: grpc.aio.Channel
    inference: inference_pb2_grpc.InferenceServiceAsyncStub = field(init=False)
    models: model_pb2_grpc.ModelServiceAsyncStub = field(init=False)
    status: status_pb2_grpc.StatusServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.status = status_pb2_grpc.StatusServiceStub(self.channel)

    async def ids(self, model: str = "tiny", **fields: Any) -> list[int]:
        """Return the ids of a short greedy stream."""
        call = self.inference.Generate(greedy(model=model, max_tokens=8, **fields))
        return [i async for message in call for i in message.token_ids]

    async def endless(self, model: str = "tiny") -> Any:
        """Return a stream that has begun and will not end soon."""
        call = self.inference.Generate(greedy(model=model))
        await anext(aiter(call))
        return call

    async def workers(self) -> list[status_pb2.WorkerStatus]:
        """Return what the status says of workers."""
        return list((await self.status.GetStatus(status_pb2.GetStatusRequest())).status.workers)

    async def until(self, name: str, state: types_pb2.ModelState.ValueType) -> None:
        """Wait until a model is in a state."""
        watch = self.models.WatchModels(model_pb2.WatchModelsRequest(model=name))
        async for message in watch:
            if message.model.state == state:
                break
        watch.cancel()


@asynccontextmanager
async def session(
    *models: tuple[str, Path], options: tuple[str, ...] = ()
) -> AsyncIterator[Session]:
    """Serve these models around the body; at the end nothing of the server is left."""
    named = [text for name, path in models for text in ("--model", f"{name}={path}")]
    async with serve(*named, *options) as server:
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                yield Session(server, channel)
        finally:
            family = descendants(server.process.pid)
    await wait_gone(family)


def descendants(pid: int) -> list[psutil.Process]:
    """Return all processes that a process has started."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def wait_gone(processes: list[psutil.Process]) -> None:
    """Wait until all of these have ended; fail where one does not.

    One whose parent was killed may stay a zombie: ended, but not reaped by whoever inherited it.
    """
    async with asyncio.timeout(END_S_MAX):
        for process in processes:
            await _end_of(process.pid)


async def _end_of(pid: int) -> None:
    if sys.platform != "linux":
        await asyncio.to_thread(psutil.wait_procs, [psutil.Process(pid)], END_S_MAX)
        assert not psutil.pid_exists(pid)
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


@pytest.fixture(name="tiny", scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real model with a long context."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context_max=CONTEXT)


@pytest.mark.asyncio
async def test_a_worker_that_is_killed_is_lost_to_its_stream_and_replaced(tiny: Path) -> None:
    """SIGKILL with migrate=false: WORKER_LOST with the signal; the next request succeeds."""
    async with session(("tiny", tiny)) as its:
        before = await its.ids()
        stream = its.inference.Generate(greedy(model="tiny", migrate=False))
        await anext(aiter(stream))
        (worker,) = await its.workers()
        os.kill(worker.pid, signal.SIGKILL)
        error = await error_of(stream)
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(error, WorkerLost)
        assert error.offset > 0
        assert error.cause == "signal 9"

        assert await its.ids() == before
        fresh, dead = await its.workers()
        assert (dead.pid, dead.exit_code) == (worker.pid, -signal.SIGKILL)
        assert fresh.pid != worker.pid
        assert not fresh.HasField("exit_code")


@pytest.mark.asyncio
async def test_workers_end_when_their_controller_is_killed(tiny: Path) -> None:
    """SIGKILL to the controller: the worker notices and is gone within its grace."""
    with tempfile.TemporaryDirectory(prefix="mlxd-test-") as folder:
        async with session(
            ("tiny", tiny), options=("--run-dir", folder, "--orphan-grace", "1s")
        ) as its:
            await its.ids()
            (worker,) = await its.workers()
            assert worker.address.startswith(f"unix:{folder}/")
            process = psutil.Process(worker.pid)
            its.server.process.kill()
            await wait_gone([process])


@pytest.mark.asyncio
async def test_sigterm_stops_everything_with_code_0(tiny: Path) -> None:
    """With a model in memory and watches open: exit 0, no process left, and soon."""
    async with session(("tiny", tiny)) as its:
        await its.ids()
        watch = its.models.WatchModels(model_pb2.WatchModelsRequest())
        await anext(aiter(watch))
        family = descendants(its.server.process.pid)
        assert family
        its.server.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(its.server.process.wait(), END_S_MAX) == 0
        await wait_gone(family)


@pytest.mark.asyncio
async def test_two_names_of_one_digest_share_a_worker(tiny: Path, tmp_path: Path) -> None:
    """A copy of the folder under another name is the same model."""
    copy = shutil.copytree(tiny, tmp_path / "copy")
    async with session(("tiny", tiny), ("twin", copy)) as its:
        outcomes = await asyncio.gather(its.ids("tiny"), its.ids("twin"))
        assert outcomes[0] == outcomes[1]
        assert len(await its.workers()) == 1
        page = await its.models.ListModels(model_pb2.ListModelsRequest())
        assert [(m.name, list(m.aliases)) for m in page.models] == [("tiny", ["twin"])]


@pytest.mark.asyncio
async def test_concurrent_first_requests_cause_one_load(tiny: Path) -> None:
    """Ten requests for a cold model: one process, ten equal answers."""
    async with session(("tiny", tiny)) as its:
        outcomes = await asyncio.gather(*(its.ids() for _ in range(10)))
        assert all(ids == outcomes[0] for ids in outcomes)
        assert len(descendants(its.server.process.pid)) == 1


@pytest.mark.asyncio
async def test_keep_alive_zero_unloads_and_the_process_is_gone(tiny: Path) -> None:
    """The stream is served to its end, then its memory is the system's again."""
    async with session(("tiny", tiny)) as its:
        assert await its.ids(keep_alive=Duration(seconds=0))
        await its.until("tiny", UNLOADED)
        assert descendants(its.server.process.pid) == []


@pytest.mark.asyncio
async def test_a_forced_unload_aborts_and_a_gentle_one_waits(tiny: Path) -> None:
    """Force: ABORTED. Gentle: the stream ends by itself, and the unload answers after it."""
    async with session(("tiny", tiny)) as its:
        stream = await its.endless()
        forced = await its.models.UnloadModel(
            model_pb2.UnloadModelRequest(model="tiny", force=True)
        )
        assert forced.streams_aborted == 1
        assert isinstance(await error_of(stream), ModelUnloaded)
        assert descendants(its.server.process.pid) == []

        call = its.inference.Generate(greedy(model="tiny", max_tokens=200))
        messages = aiter(call)
        await anext(messages)
        unloading = its.models.UnloadModel(model_pb2.UnloadModelRequest(model="tiny"))
        last = [message async for message in messages][-1]
        assert last.usage.completion_tokens == 200
        assert (await unloading).streams_aborted == 0


@pytest.mark.asyncio
async def test_one_model_makes_room_for_another_and_memory_comes_back(
    tiny: Path, tmp_path: Path
) -> None:
    """max_loaded 1: the idle model's process is gone when the other serves."""
    other = write_tiny_model(tmp_path / "other", seed=2)
    async with session(("tiny", tiny), ("other", other), options=("--max-loaded", "1")) as its:
        await its.ids("tiny")
        (first,) = await its.workers()
        await its.ids("other")
        (second,) = await its.workers()
        assert (first.model_name, second.model_name) == ("tiny", "other")
        assert not psutil.pid_exists(first.pid)


@pytest.mark.asyncio
async def test_a_model_that_a_worker_refuses_is_refused_with_its_reason(tmp_path: Path) -> None:
    """What only the worker can see comes through as it is; the model is FAILED, then repaired."""
    folder = write_tiny_model(tmp_path / "m")
    tokenizer = folder / "tokenizer.json"
    good = tokenizer.read_bytes()
    tokenizer.unlink()
    async with session(("m", folder)) as its:
        error = await error_of(its.inference.Generate(greedy(model="m")))
        assert isinstance(error, InvalidModel)
        assert error.file == "tokenizer.json"
        assert descendants(its.server.process.pid) == []
        tokenizer.write_bytes(good)
        assert len(await its.ids("m")) == 8
