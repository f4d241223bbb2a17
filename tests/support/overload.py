"""Many clients of one server, and one idle observer of it, each a process of its own.

    python -m tests.support.overload crowd ADDRESS MODEL STREAMS TOKENS AT_ONCE
    python -m tests.support.overload observe ADDRESS BARE EVERY_S

A crowd offers its streams, at most so many at once, and prints one JSON object about them: a client
that is refused comes back when it was told to. An observer asks for health and status in turn until
its standard input ends, and prints what the answers took, those of a bare server at BARE beside
them, and the most memory they told of.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
)
from mlxd_shared import config
from mlxd_shared.domain.errors import QueueFull
from mlxd_shared.security.net import CHANNEL_OPTIONS
from mlxd_shared.wire.status import from_call

TRIES_MAX = 20


@dataclass(slots=True)
class Crowd:
    """What became of a crowd's streams."""

    wall_s: float = 0.0
    tokens: int = 0
    complete: int = 0
    complete_at_first: int = 0
    """Streams that were never refused."""
    retries: list[int] = field(default_factory=list)
    """Of those that were, how often they came back until they were let in."""
    waits_s: list[float] = field(default_factory=list)
    """What the refused were told, first refusals only."""
    first_token_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Observed:
    """What an observer saw."""

    status_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    """What a server took for an answer that does nothing else."""
    most_bytes: int = 0
    budget_bytes: int = 0
    most_waiting: int = 0
    most_running: int = 0
    most_streams: int = 0
    """That run or wait: some count as waiting until the step that gives them their row."""
    kv_bytes_max: int = 0
    most_reserved_bytes: int = 0
    most_resident_bytes: int = 0
    """Of all workers together, as the system counts it."""
    most_loaded: int = 0
    """Workers with a model, or with one that comes or goes."""
    sums_broken: int = 0
    """How often a worker's accounts were not the total that it told."""


async def wait(seconds: float) -> None:
    """Wait for a moment on the event loop's clock."""
    reached = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, reached.set)
    await reached.wait()


def request_of(model: str, number: int, tokens: int) -> inference_pb2.GenerateRequest:
    """Return a stream of exactly so many tokens, of a prompt of its own."""
    return inference_pb2.GenerateRequest(
        model=model,
        text=f"Once upon a time, {number} days ago, a king",
        sampling=types_pb2.SamplingOptions(temperature=0.8, seed=number),
        max_tokens=tokens,
        ignore_eos=True,
    )


async def crowd(address: str, model: str, streams: int, tokens: int, at_once: int) -> Crowd:
    """Offer the streams, over as many connections as they need; return what became of them."""
    seen = Crowd()
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(-(-at_once // config.STREAMS_PER_CONNECTION_MAX))
        ]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        begin_s = time.monotonic()

        async def one(number: int) -> None:
            stub = stubs[number % len(stubs)]
            for tries in range(TRIES_MAX):
                try:
                    await _stream(stub, request_of(model, number, tokens), seen, begin_s)
                except grpc.aio.AioRpcError as error:
                    known = from_call(error)
                    if not isinstance(known, QueueFull):
                        seen.failures.append(str(known))
                        return
                    if tries == 0:
                        seen.waits_s.append(known.retry_after_s)
                    await wait(known.retry_after_s)
                else:
                    seen.complete += 1
                    if tries:
                        seen.retries.append(tries)
                    else:
                        seen.complete_at_first += 1
                    return
            seen.failures.append(f"refused {TRIES_MAX} times")

        async def client(left: Iterator[int]) -> None:
            for number in left:
                await one(number)

        numbers = iter(range(streams))
        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client(numbers))
        seen.wall_s = time.monotonic() - begin_s
    return seen


async def _stream(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    request: inference_pb2.GenerateRequest,
    seen: Crowd,
    begin_s: float,
) -> None:
    first = True
    async for message in stub.Generate(request):
        seen.tokens += len(message.token_ids)
        if first:
            seen.first_token_s.append(time.monotonic() - begin_s)
            first = False


async def observe(address: str, bare: str, ended: asyncio.Event, *, every_s: float) -> Observed:
    """Ask for health and status in turn, with a pause of `every_s`, until `ended`."""
    seen = Observed()
    async with (
        grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS)) as channel,
        grpc.aio.insecure_channel(bare) as bare_channel,
    ):
        status = status_pb2_grpc.StatusServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        control: Any = health_pb2_grpc.HealthStub(bare_channel)
        while not ended.is_set():
            begin_s = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest())
            middle_s = time.monotonic()
            got = await status.GetStatus(status_pb2.GetStatusRequest())
            seen.health_s.append(middle_s - begin_s)
            seen.status_s.append(time.monotonic() - middle_s)
            _note(got.status, seen)
            begin_s = time.monotonic()
            await control.Check(health_pb2.HealthCheckRequest())
            seen.bare_s.append(time.monotonic() - begin_s)
            await wait(every_s)
    return seen


def _note(status: status_pb2.Status, seen: Observed) -> None:
    workers = status.workers
    seen.most_bytes = max(seen.most_bytes, sum(w.memory.total_bytes for w in workers))
    seen.most_waiting = max(seen.most_waiting, sum(w.streams_waiting for w in workers))
    seen.most_running = max(seen.most_running, sum(w.streams_running for w in workers))
    streams = sum(w.streams_waiting + w.streams_running for w in workers)
    seen.most_streams = max(seen.most_streams, streams)
    seen.budget_bytes = sum(device.budget_bytes for device in status.devices)
    seen.most_reserved_bytes = max(
        seen.most_reserved_bytes, sum(device.reserved_bytes for device in status.devices)
    )
    seen.most_resident_bytes = max(
        seen.most_resident_bytes, sum(w.memory.resident_bytes for w in workers)
    )
    seen.most_loaded = max(seen.most_loaded, sum(not w.HasField("exit_code") for w in workers))
    seen.sums_broken += sum(
        sum(a.bytes for a in w.memory.accounts) != w.memory.total_bytes for w in workers
    )
    held = [a.bytes for w in workers for a in w.memory.accounts if a.name == "kv"]
    seen.kv_bytes_max = max(seen.kv_bytes_max, *held, 0)


async def _until_input_ends(address: str, bare: str, every_s: float) -> Observed:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    observing = asyncio.create_task(observe(address, bare, ended, every_s=every_s))
    await loop.run_in_executor(None, sys.stdin.read)
    ended.set()
    return await observing


def main() -> None:
    """Do what the command line says."""
    verb, address, *rest = sys.argv[1:]
    if verb == "crowd":
        model, streams, tokens, at_once = rest
        result: Crowd | Observed = asyncio.run(
            crowd(address, model, int(streams), int(tokens), int(at_once))
        )
    else:
        bare, every_s = rest
        result = asyncio.run(_until_input_ends(address, bare, float(every_s)))
    sys.stdout.write(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
