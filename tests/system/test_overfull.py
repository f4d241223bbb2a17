"""One request never stops a controller or a worker: the worst there are, while others are served.

What is refused here took 2 to 12 s of the event loop each, and up to gigabytes, when it was parsed
before it was looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.net import CHANNEL_OPTIONS
from mlxd_shared.wire.status import RemoteError, from_call
from tests.support.calls import error_of, health
from tests.support.overfull import ATTACKS, frame
from tests.support.served import serve
from tests.support.worker_process import running_worker

GENERATE = "/mlxd.v1.InferenceService/Generate"
SILENT_MAX_S = 20.0
"""Generous: health was unanswered for 58 s."""
GROWN_MAX = 1 << 30
LIMIT_S = 120.0


def worst(nbytes_max: int) -> Iterator[tuple[str, bytes]]:
    """Yield each attack, as large as a server of these limits reads."""
    for name, raw in ATTACKS.items():
        yield name, raw[: nbytes_max - nbytes_max % 4]


async def outcome(channel: grpc.aio.Channel, raw: bytes, method: str = GENERATE) -> Any:
    """Send bytes as a Generate; return the error that they meet."""
    call: Any = channel.unary_stream(method)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call(raw, timeout=LIMIT_S):
            pass
    return from_call(caught.value)


@asynccontextmanager
async def asked_for_health(channel: grpc.aio.Channel) -> AsyncIterator[list[float]]:
    """Ask for health again and again around the body; yields how long each answer took."""
    waits_s: list[float] = []

    async def ask() -> None:
        while True:
            begun_s = time.monotonic()
            assert await health(channel, "") == 1
            waits_s.append(time.monotonic() - begun_s)

    asking = asyncio.create_task(ask())
    try:
        yield waits_s
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_controller_refuses_the_worst_and_goes_on() -> None:
    """Each is INVALID_ARGUMENT with a field, health is answered all the while, memory is kept."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with (
        serve() as server,
        grpc.aio.insecure_channel(server.address, options=options) as channel,
        grpc.aio.insecure_channel(server.address, options=options) as other,
    ):
        process = psutil.Process(server.process.pid)
        before_nbytes = process.memory_info().rss
        async with asked_for_health(other) as waits_s:
            for name, raw in worst(config.REQUEST_BYTES_MAX):
                errors = await asyncio.gather(*(outcome(channel, raw) for _ in range(2)))
                for error in errors:
                    assert isinstance(error, InvalidRequest), (name, error)
                    assert len(error.violations) == 1, (name, error)
        assert len(waits_s) > len(ATTACKS)
        assert max(waits_s) < SILENT_MAX_S
        assert process.memory_info().rss - before_nbytes < GROWN_MAX
        long = await outcome(channel, frame(2, b"x" * config.RELAYED_REQUEST_BYTES_MAX))
        assert isinstance(long, RemoteError)
        assert long.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        models = model_pb2_grpc.ModelServiceStub(channel)
        name = "x" * (config.SMALL_REQUEST_BYTES_MAX + 1)
        error = await error_of(models.GetModel(model_pb2.GetModelRequest(model=name)))
        assert isinstance(error, InvalidRequest)
        assert str(config.SMALL_REQUEST_BYTES_MAX) in error.describe()


@pytest.mark.asyncio
async def test_a_worker_refuses_the_worst_and_goes_on() -> None:
    """Its own clients, and a controller that were broken, cannot stop it either."""
    async with running_worker() as worker:
        async with asked_for_health(worker.channel) as waits_s:
            for name, raw in worst(config.RELAYED_REQUEST_BYTES_MAX):
                error = await outcome(worker.channel, raw)
                assert isinstance(error, InvalidRequest), (name, error)
            load = "/mlxd.v1.WorkerService/Load"
            error = await outcome(worker.channel, b"\x2a\x00" * 100_000, load)
            assert isinstance(error, InvalidRequest)
        assert max(waits_s) < SILENT_MAX_S


TIMES = [
    (Timestamp(nanos=-1), "chat.now.nanos"),
    (Timestamp(nanos=1_000_000_000), "chat.now.nanos"),
    (Timestamp(seconds=5, nanos=-5), "chat.now.nanos"),
    (Timestamp(seconds=-5), "chat.now"),
    (Timestamp(seconds=1 << 62), "chat.now"),
]


@pytest.mark.asyncio
async def test_a_time_that_is_none_is_refused_by_its_field() -> None:
    """Out of range on either side of the point: INVALID_ARGUMENT, not a bug's INTERNAL."""
    async with (
        serve() as server,
        grpc.aio.insecure_channel(server.address, options=[*CHANNEL_OPTIONS]) as channel,
    ):
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        for now, field in TIMES:
            request = inference_pb2.GenerateRequest()
            request.chat.messages.add(role="user", content="hi")
            request.chat.now.CopyFrom(now)
            error = await error_of(inference.Generate(request))
            assert isinstance(error, InvalidRequest), error
            assert [violation.field for violation in error.violations] == [field]
