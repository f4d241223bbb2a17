"""What makes the rarer fields of the answers appear: deaths, queues, evictions, two names."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, model_pb2, status_pb2, types_pb2
from mlxd_shared.domain.errors import WorkerLost
from tests.support.cli import LIMIT_S
from tests.system.wire.model_probes import get, load, unload
from tests.system.wire.probe import GREEDY, LONG, Wire, read, refusal


async def status_until(wire: Wire, holds: Callable[[status_pb2.Status], bool]) -> status_pb2.Status:
    """Watch the status until `holds`, and return that one."""
    request = status_pb2.WatchStatusRequest(interval=Duration(nanos=100_000_000))
    call = wire.status.WatchStatus(request)
    async with asyncio.timeout(LIMIT_S):
        async for message in call:
            wire.recorder.see(message)
            if holds(message.status):
                call.cancel()
                return message.status
    raise AssertionError("the watch ended")


@asynccontextmanager
async def one_row_taken(wire: Wire) -> AsyncIterator[None]:
    """Load the long model with a single row, which is taken until the body has run."""
    options = types_pb2.LoadOptions(rows_max=1)
    await load(wire, model_pb2.LoadModelRequest(model=LONG, options=options))
    endless = inference_pb2.GenerateRequest(model=LONG, text="Once", ignore_eos=True)
    call = wire.inference.Generate(endless)
    await read(call)
    yield
    call.cancel()


async def until_waiting(wire: Wire, streams: int) -> None:
    """Wait until a worker has one stream that runs and so many that wait."""
    await status_until(
        wire,
        lambda s: any(w.streams_waiting == streams and w.streams_running for w in s.workers),
    )


async def streams_queue(wire: Wire) -> None:
    """With one row, a second stream waits, and the status says for how long."""
    async with one_row_taken(wire):
        request = inference_pb2.GenerateRequest(model=LONG, text="Once")
        calls = [wire.inference.Generate(request) for _ in range(2)]
        await until_waiting(wire, 2)
        assert (await get(wire, LONG)).streams_active == 3
        for call in calls:
            call.cancel()
    await status_until(wire, lambda s: not any(w.streams_running for w in s.workers))
    await unload(wire, LONG)


async def two_names_share_a_worker(wire: Wire) -> None:
    """A second name of the same folder is an alias of one digest and one worker."""
    await load(wire, model_pb2.LoadModelRequest(model=str(wire.folder), name="alias"))
    first, second = await get(wire, wire.model), await get(wire, "alias")
    assert first.digest == second.digest
    assert first.worker_incarnation == second.worker_incarnation


async def killed_after(
    wire: Wire, tokens: int, *, model: str = "", **fields: Any
) -> tuple[list[int], inference_pb2.GenerateResponse]:
    """Kill the model's worker once so many tokens of a greedy stream have come.

    Return all of its tokens, and its last message.
    """
    model = model or wire.model
    request = inference_pb2.GenerateRequest(
        model=model, text="Once upon a time", sampling=GREEDY, **fields
    )
    await wire.ids(model=model, max_tokens=1)
    incarnation = (await get(wire, model)).worker_incarnation
    status = await status_until(
        wire, lambda s: any(w.incarnation == incarnation for w in s.workers)
    )
    (pid,) = [w.pid for w in status.workers if w.incarnation == incarnation]
    ids: list[int] = []
    killed = False
    async for message in wire.inference.Generate(request):
        last = wire.recorder.see(message)
        assert last.offset == len(ids)
        ids += last.token_ids
        if not killed and len(ids) >= tokens:
            killed = True
            os.kill(pid, signal.SIGKILL)
    return ids, last


async def a_worker_dies(wire: Wire) -> None:
    """Kill -9 ends a stream that may not move; status and model tell how the worker ended."""
    await load(wire, model_pb2.LoadModelRequest(model=LONG))
    incarnation = (await get(wire, LONG)).worker_incarnation
    endless: dict[str, Any] = {"model": LONG, "num_predict": 0, "ignore_eos": True}
    error = await refusal(killed_after(wire, 1, migrate=False, **endless))
    assert isinstance(error, WorkerLost)
    dead = await status_until(
        wire,
        lambda s: any(w.incarnation == incarnation and w.HasField("exit_code") for w in s.workers),
    )
    (code,) = [w.exit_code for w in dead.workers if w.incarnation == incarnation]
    assert code == -signal.SIGKILL
    assert (await get(wire, LONG)).error
    assert len(await wire.ids(model=LONG)) == 12, "the next request has a new worker"
