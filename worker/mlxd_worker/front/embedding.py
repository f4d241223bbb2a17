"""Texts to vectors: each text is a stream of its own that draws nothing.

Invariants:
- At most EMBED_STREAMS_MAX texts of a request are with the engine at once, in turn with everybody
  else's streams; the next goes when one is done.
- Whoever leaves has its streams cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxd_shared import config
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest
from mlxd_shared.domain.requests import DEFAULTS, EmbedSpec, resolve
from mlxd_worker.engine.request import Finished, Submit
from mlxd_worker.front.prompting import check_ids, check_length
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of all texts, and what was read for them."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int


async def embed(
    worker: Worker, spec: EmbedSpec, loaded: Loaded, *, left_s: float | None = None
) -> Embedded:
    """Return each text's vector.

    left_s: seconds until the deadline.

    Raises:
        FieldNotServed: the model makes no vectors.
        InvalidRequest: a text that this model cannot read whole, or more dimensions than there are.
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
    turns = asyncio.Semaphore(config.EMBED_STREAMS_MAX)
    prompts = [
        await _prompt(worker, text, loaded, field=f"texts[{index}]")
        for index, text in enumerate(spec.texts)
    ]

    async def embed_one(prompt: tuple[int, ...]) -> tuple[float, ...]:
        request_id = uuid.uuid4().hex
        async with turns:
            with worker.streams.open(request_id, rows_max=loaded.rows_max) as stream:
                reader = worker.engine.reader()
                request = Submit(
                    stream=stream,
                    prompt=prompt,
                    sampling=resolve(DEFAULTS, seed=0),
                    max_tokens=1,
                    stop=(),
                    stop_token_ids=frozenset(),
                    eos_ids=frozenset(),
                    skip_special_tokens=True,
                    submitted_s=time.monotonic(),
                    sink=reader,
                    request_id=request_id,
                    deadline_s=deadline_s,
                    pooling=spec.pooling,
                )
                with worker.running(request, loaded):
                    event = await reader.next()
        assert isinstance(event, Finished), "nothing is drawn"
        return _finish_vector(event.embedding, spec)

    tasks = [asyncio.create_task(embed_one(prompt)) for prompt in prompts]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Embedded(tuple(vectors), sum(map(len, prompts)))


async def _prompt(worker: Worker, text: str, loaded: Loaded, *, field: str) -> tuple[int, ...]:
    """Return a text's ids, which the context holds."""
    check_length(len(text), loaded, field=field)
    ids = await worker.tokens.encode(loaded.tokenizer, text, field=field, kind="embed")
    return check_ids(ids, loaded, field=field, what="text")


def _finish_vector(vector: Sequence[float], spec: EmbedSpec) -> tuple[float, ...]:
    """Return a vector as it was asked for: shortened, then scaled."""
    if spec.dimensions is not None:
        if spec.dimensions > len(vector):
            limit = f"{spec.dimensions} is above the {len(vector)} dimensions that the model has"
            raise InvalidRequest.of("dimensions", limit)
        vector = vector[: spec.dimensions]
    length = math.sqrt(math.fsum(value * value for value in vector))
    if not spec.normalize or length == 0:
        return tuple(vector)
    return tuple(value / length for value in vector)
