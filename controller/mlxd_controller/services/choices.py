"""Several completions of one prompt: one stream for each, merged.

Invariants:
- Each choice is a stream of its own: it has its own lease, migration and end.
- The whole fails with the first choice that fails; no choice outlives it.
- The worker evaluates their common prompt once: the others wait for the first one's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2
from mlxd_shared.domain.requests import SEEDS


def choice_ids(request_id: str, choices: int) -> tuple[str, ...]:
    """Return the request id of each choice; the first one has that of the whole request."""
    return (request_id, *(f"{request_id}.{choice}" for choice in range(1, choices)))


def split(
    request: inference_pb2.GenerateRequest,
    request_id: str,
    choices: int,
    *,
    now: Timestamp | None = None,
) -> list[inference_pb2.GenerateRequest]:
    """Return what each choice changes of a request; the first one keeps its id and seed.

    One choice that is all there is changes nothing but the id, if the request had none. now: the
    time of its conversation, if that has none: a template sees the same one on every worker.
    """
    split_up = []
    for choice, own_id in enumerate(choice_ids(request_id, choices)):
        own = inference_pb2.GenerateRequest(request_id=own_id)
        if choices > 1:
            own.n = 1
        if now is not None:
            own.chat.now.CopyFrom(now)
        if choice:
            own.choice = choice
            if request.sampling.HasField("seed"):
                own.sampling.seed = (request.sampling.seed + choice) % SEEDS
        split_up.append(own)
    return split_up


async def merge(streams: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    """Yield the messages of all streams as they arrive, those of each stream in order.

    Raises:
        Exception: that of the first stream to fail.
    """
    arrived: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pass_on(stream, arrived)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            match await arrived.get():
                case None:
                    left -= 1
                case bytes(frame):
                    yield frame
                case BaseException() as error:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    stream: AsyncGenerator[bytes, None], arrived: asyncio.Queue[bytes | BaseException | None]
) -> None:
    """Put a stream's messages into a queue, then None, or the error it failed with."""
    try:
        async with aclosing(stream):
            async for frame in stream:
                await arrived.put(frame)
    except Exception as error:  # noqa: BLE001 - the reader raises it
        await arrived.put(error)
    else:
        await arrived.put(None)
