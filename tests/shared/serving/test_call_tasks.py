"""Calls that are reset: their tasks end, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import ClassVar

import grpc
import pytest

from mlxd.v1 import inference_pb2
from mlxd.v1 import inference_pb2_grpc as grpcs
from mlxd_shared.serving.call_tasks import CallTask, spare_batches
from tests.support.attacks.rapid_reset import STREAMS_PER_CONNECTION, reset_once
from tests.support.attacks.tally import Tally
from tests.support.turns import turn_until

CONNECTIONS, TRIES = 8, 1000
KEPT_NBYTES_MAX = 40.0
"""Of a call that is reset; a batch's operation alone takes 80."""


class _Memory(ctypes.Structure):
    """What malloc says of itself (mallinfo2)."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def used_nbytes() -> int:
    """What malloc has handed out and not got back, by any thread; not Python's small objects."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Memory
    gc.collect()
    return int(read().uordblks)


class _Server(grpcs.InferenceServiceServicer):
    """Answers with one message."""

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Send one message."""
        yield inference_pb2.GenerateResponse()


async def ask(stub: grpcs.InferenceServiceAsyncStub) -> None:
    """Make calls until one is answered: where too many wait, gRPC turns calls away."""
    for _ in range(TRIES):
        with suppress(grpc.aio.AioRpcError):
            async for _ in stub.Generate(inference_pb2.GenerateRequest()):
                return
    raise AssertionError("no call was answered")


async def lost_a_reset() -> float:
    """Return how many bytes a reset call leaves behind in a server of this loop."""
    server = grpc.aio.server()
    grpcs.add_InferenceServiceServicer_to_server(_Server(), server)  # type: ignore[abstract]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: grpcs.InferenceServiceAsyncStub = grpcs.InferenceServiceStub(channel)
        await ask(stub)
        tasks = len(asyncio.all_tasks())

        async def reset(connections: int) -> int:
            for _ in range(connections):
                await reset_once(address, Tally(), end_s=time.monotonic() + 60.0, pause_s=0.002)
            await ask(stub)  # its turn is behind theirs
            await turn_until(lambda: len(asyncio.all_tasks()) <= tasks)
            return used_nbytes()

        before = await reset(2)
        lost_nbytes = await reset(CONNECTIONS) - before
    await server.stop(None)
    return lost_nbytes / (CONNECTIONS * STREAMS_PER_CONNECTION)


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc what it has handed out")
@pytest.mark.asyncio
async def test_calls_that_are_reset_leave_no_memory_behind() -> None:
    """Without the tasks of ours each leaves a batch's operations, which shows that this looks."""
    assert await lost_a_reset() > KEPT_NBYTES_MAX
    spare_batches(asyncio.get_running_loop())
    assert await lost_a_reset() < KEPT_NBYTES_MAX


class _Batch:
    """A call of gRPC's as its task sees it, and what becomes of its batch."""

    def __init__(self) -> None:
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.freed = self.handled = False

    async def execute_batch(self) -> None:
        """Wait for the core, then free the operations."""
        await self.result
        self.freed = True

    async def _handle_exceptions(self) -> None:
        await self.execute_batch()
        self.handled = True
        await asyncio.Event().wait()


def begin(batch: _Batch) -> asyncio.Task[None]:
    """Return the running task of a call."""
    loop = asyncio.get_running_loop()
    spare_batches(loop)
    task = loop.create_task(batch._handle_exceptions())
    assert isinstance(task, CallTask)
    return task


@pytest.mark.asyncio
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_waits_for_the_batch_and_no_longer(times: int) -> None:
    """However often it is repeated: then it comes, at the next thing that is waited for."""
    batch = _Batch()
    task = begin(batch)
    await asyncio.sleep(0)
    for _ in range(times):
        assert task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    batch.result.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.freed


@pytest.mark.asyncio
@pytest.mark.parametrize("act", ["done", "handled"])
async def test_a_cancellation_is_never_lost(act: str) -> None:
    """Also where the batch is done and its task has not heard, and where a handler waits."""
    batch = _Batch()
    task = begin(batch)
    await asyncio.sleep(0)
    batch.result.set_result(None)
    if act == "handled":
        await turn_until(lambda: batch.handled)
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.freed
    assert not task.cancel()


@pytest.mark.asyncio
async def test_other_tasks_and_other_factories_stay_as_they_are() -> None:
    """A loop's own factory is its owner's, and only calls have tasks of this kind."""
    loop = asyncio.get_running_loop()
    spare_batches(loop)
    other = loop.create_task(asyncio.sleep(0))
    assert type(other) is asyncio.Task
    await other

    def own(loop: asyncio.AbstractEventLoop, coro: object, **_: object) -> asyncio.Task[None]:
        raise AssertionError("not to be called")

    set_factory: Callable[[object], None] = loop.set_task_factory  # type: ignore[assignment]
    set_factory(own)
    spare_batches(loop)
    assert loop.get_task_factory() is own
    loop.set_task_factory(None)
