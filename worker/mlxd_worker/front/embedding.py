"""Texts to vectors: each text is a stream of its own that draws nothing.

Invariants:
- At most EMBED_STREAMS_MAX texts of a request are with the engine at once, in turn with all other
  streams; the next one starts when one is done.
- If the caller leaves, its streams are cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from mlxd_shared import config
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest
from mlxd_shared.domain.requests import DEFAULTS, EmbedSpec, Pooling, resolve
from mlxd_worker.engine.request import Finished, Submit, Tokens
from mlxd_worker.front.prompting import check_ids, check_length
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded

_T = TypeVar("_T")


async def embed(
    worker: Worker, spec: EmbedSpec, loaded: Loaded, *, left_s: float | None = None
) -> tuple[list[tuple[float, ...]], int]:
    """Return each text's vector, and how many tokens were evaluated for all.

    left_s: seconds until the deadline.

    Raises:
        FieldNotServed: the model makes no vectors.
        InvalidRequest: a text does not fit the context, or the model has fewer dimensions.
        InvalidModel: the pooling is left open, and the model's own is not served.
        QueueFull: too many streams wait.
        MlxdError: whatever ended a text's stream.
    """
    if not loaded.embeds:
        raise FieldNotServed("Embed by a model that is served through mlx-lm")
    spec = replace(
        spec,
        pooling=loaded.embedding.pooling_of(spec),
        normalize=loaded.embedding.normalizes(spec),
    )
    deadline_s = None if left_s is None else time.monotonic() + left_s
    prompts = [
        await _prompt(worker, text, loaded, field=f"texts[{index}]")
        for index, text in enumerate(spec.texts)
    ]
    readings = [Reading(prompt, pooling=spec.pooling) for prompt in prompts]
    finish = partial(_finish_vector, spec)
    vectors = await read_all(worker, loaded, readings, finish, deadline_s=deadline_s)
    return vectors, sum(map(len, prompts))


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt that is evaluated for its own sake: for a vector, or for scores of its tokens."""

    ids: tuple[int, ...]
    pooling: Pooling | None = None
    scored_from: int | None = None
    """Score the tokens from this index on; None: none."""


async def read_all(
    worker: Worker,
    loaded: Loaded,
    readings: Sequence[Reading],
    finish: Callable[[Tokens | Finished], _T],
    *,
    deadline_s: float | None,
) -> list[_T]:
    """Return what `finish` makes of the first event of each prompt's stream.

    Raises:
        QueueFull: too many streams wait.
        MlxdError: whatever ended a stream.
    """
    turns = asyncio.Semaphore(config.EMBED_STREAMS_MAX)

    async def read(reading: Reading) -> _T:
        request_id = uuid.uuid4().hex
        async with turns:
            with worker.streams.open(request_id, rows_max=loaded.rows_max) as stream:
                reader = worker.engine.reader()
                request = Submit(
                    stream=stream,
                    prompt=reading.ids,
                    sampling=resolve(DEFAULTS, seed=0),
                    max_tokens=1,
                    submitted_s=time.monotonic(),
                    sink=reader,
                    request_id=request_id,
                    deadline_s=deadline_s,
                    pooling=reading.pooling,
                    prompt_logprobs=None if reading.scored_from is None else 1,
                    scored_from=reading.scored_from or 1,
                )
                with worker.running(request, loaded):
                    event = await reader.next()
        return finish(event)

    tasks = [asyncio.create_task(read(reading)) for reading in readings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _prompt(worker: Worker, text: str, loaded: Loaded, *, field: str) -> tuple[int, ...]:
    """Return a text's ids, checked against the context."""
    check_length(len(text), loaded, field=field)
    ids = await worker.tokens.encode(loaded.tokenizer, text, field=field, kind="embed")
    return check_ids(ids, loaded, field=field, what="text")


def _finish_vector(spec: EmbedSpec, event: Tokens | Finished) -> tuple[float, ...]:
    """Return a vector as requested: shortened, then scaled."""
    assert isinstance(event, Finished), "nothing is drawn"
    vector = event.embedding
    if spec.dimensions is not None:
        if spec.dimensions > len(vector):
            limit = f"{spec.dimensions} is above the model's {len(vector)} dimensions"
            raise InvalidRequest.of("dimensions", limit)
        vector = vector[: spec.dimensions]
    length = math.sqrt(math.fsum(value * value for value in vector))
    if not spec.normalize or length == 0:
        return tuple(vector)
    return tuple(value / length for value in vector)
