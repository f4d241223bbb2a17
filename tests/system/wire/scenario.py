"""What makes the rarer fields of the answers appear: deaths, queues, evictions, two names."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterable, Callable

from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, model_pb2, status_pb2, types_pb2
from mlxd_shared.errors import WorkerLost
from tests.system.wire.model_probes import get, load, unload
from tests.system.wire.probe import Wire, read, refusal


async def status_until(wire: Wire, holds: Callable[[status_pb2.Status], bool]) -> status_pb2.Status:
    """Watch the status until `holds`, and return that one."""
    request = status_pb2.WatchStatusRequest(interval=Duration(nanos=100_000_000))
    call = wire.status.WatchStatus(request)
    async with asyncio.timeout(30):
        async for message in call:
            wire.recorder.see(message)
            if holds(message.status):
                call.cancel()
                return message.status
    raise AssertionError("the watch ended")


def endless(wire: Wire) -> inference_pb2.GenerateRequest:
    """Return a request that goes on until the context is full."""
    return inference_pb2.GenerateRequest(model=wire.model, text="Once", ignore_eos=True)


async def streams_queue(wire: Wire) -> None:
    """With one row, a second stream waits, and the status says for how long."""
    await unload(wire, wire.model)
    options = types_pb2.LoadOptions(rows_max=1)
    await load(wire, model_pb2.LoadModelRequest(model=wire.model, options=options))
    calls = [wire.inference.Generate(endless(wire)) for _ in range(3)]
    await read(calls[0])
    await status_until(
        wire, lambda s: any(w.streams_waiting and w.streams_running for w in s.workers)
    )
    assert (await get(wire, wire.model)).streams_active == 3
    for call in calls:
        call.cancel()
    await status_until(wire, lambda s: not any(w.streams_running for w in s.workers))


async def two_names_share_a_worker(wire: Wire) -> None:
    """A second name of the same folder is an alias of one digest and one worker."""
    await load(wire, model_pb2.LoadModelRequest(model=str(wire.folder), name="alias"))
    first, second = await get(wire, wire.model), await get(wire, "alias")
    assert first.digest == second.digest
    assert first.worker_incarnation == second.worker_incarnation


async def a_worker_dies(wire: Wire) -> None:
    """Kill -9 ends the stream with WORKER_LOST; status and model tell how the worker ended."""
    await load(wire, model_pb2.LoadModelRequest(model=wire.model))
    status = await status_until(
        wire, lambda s: any(w.state == types_pb2.MODEL_STATE_READY for w in s.workers)
    )
    (pid,) = [w.pid for w in status.workers if w.state == types_pb2.MODEL_STATE_READY]
    call = wire.inference.Generate(endless(wire))
    await read(call)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(await refusal(_drain(call)), WorkerLost)
    dead = await status_until(wire, lambda s: any(w.HasField("exit_code") for w in s.workers))
    assert [w.exit_code for w in dead.workers if w.pid == pid] == [-signal.SIGKILL]
    assert (await get(wire, wire.model)).error
    assert len(await wire.ids()) == 12, "the next request has a new worker"


async def _drain(messages: AsyncIterable[object]) -> None:
    async for _ in messages:
        pass
