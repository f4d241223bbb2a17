"""What others get beside an attack, as processes of their own: a prober's health, a good stream.

    python -m tests.support.attacks.watcher health ADDRESS BARE
    python -m tests.support.attacks.watcher stream ADDRESS TOKENS

Until its standard input ends, a prober asks for health ten times a second, over a connection that
lasts and one that is new, in turn; beside each it asks a bare server at BARE, which shows what the
machine alone takes. A good client has one stream after another. Each prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.attacks.attacker import OPTIONS
from tests.support.attacks.hostile import MODEL
from tests.support.attacks.tally import count, details_of, retry_time_s
from tests.support.overload import wait

EVERY_S = 0.1
DEADLINE_S = 30.0
COME_BACK_S = 0.5
"""What a good client waits that was not told how long."""


@dataclass(slots=True)
class Probed:
    """How long health took."""

    old_s: list[float] = field(default_factory=list)
    fresh_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Streamed:
    """What a good client had."""

    tokens_per_s: list[float] = field(default_factory=list)
    """Of each whole stream, from its call to its end."""
    first_token_s: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    """One, however many streams."""


async def probe(address: str, bare: str, ended: asyncio.Event) -> Probed:
    """Ask for health until `ended`, at a steady rate however long answers take."""
    seen = Probed()
    async with (
        grpc.aio.insecure_channel(address, options=OPTIONS) as old,
        grpc.aio.insecure_channel(bare, options=OPTIONS) as control,
        asyncio.TaskGroup() as asking,
    ):
        number = 0
        while not ended.is_set():
            number += 1
            if number % 2:
                asking.create_task(_check(old, seen.old_s, seen.failures))
            else:
                asking.create_task(_check_afresh(address, seen))
            asking.create_task(_check(control, seen.bare_s, {}))
            await wait(EVERY_S)
    return seen


async def _check(channel: grpc.aio.Channel, seconds: list[float], failures: dict[str, int]) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    begin_s = time.monotonic()
    try:
        await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        count(failures, error.code().name)
    seconds.append(time.monotonic() - begin_s)


async def _check_afresh(address: str, seen: Probed) -> None:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        await _check(channel, seen.fresh_s, seen.failures)


async def stream(address: str, tokens: int, ended: asyncio.Event) -> Streamed:
    """Have one stream after another until `ended`, one at least."""
    seen = Streamed()
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        text="Once upon a time",
        sampling=types_pb2.SamplingOptions(temperature=0.0),
        max_tokens=tokens,
        ignore_eos=True,
    )
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while not (ended.is_set() and seen.tokens_per_s):
            try:
                await _one(stub, request, seen)
            except grpc.aio.AioRpcError as error:
                count(seen.refused, error.code().name)
                await wait(retry_time_s(details_of(error)) or COME_BACK_S)
    return seen


async def _one(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    request: inference_pb2.GenerateRequest,
    seen: Streamed,
) -> None:
    begin_s = time.monotonic()
    received, text, first_s = 0, "", None
    async for message in stub.Generate(request):
        if first_s is None:
            first_s = time.monotonic() - begin_s
        received += len(message.token_ids)
        text += message.text
    seen.tokens_per_s.append(received / (time.monotonic() - begin_s))
    seen.first_token_s.append(first_s or 0.0)
    count(seen.texts, text)


async def _until_input_ends(
    watch: Callable[[asyncio.Event], Awaitable[Probed | Streamed]],
) -> Probed | Streamed:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    watching = asyncio.ensure_future(watch(ended))
    await loop.run_in_executor(None, sys.stdin.read)
    ended.set()
    return await watching


def main() -> None:
    """Do what the command line says."""
    verb, address, rest = sys.argv[1:]
    if verb == "health":
        seen = asyncio.run(_until_input_ends(lambda ended: probe(address, rest, ended)))
    else:
        seen = asyncio.run(_until_input_ends(lambda ended: stream(address, int(rest), ended)))
    sys.stdout.write(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
