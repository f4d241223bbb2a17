"""Many draws from one row of logits, with options that are plain but for what a test is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.sampling.sampler import Draw, Purpose, sample
from tests.support.reference_sampler import draw_key

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11)
DRAWS = 20_000
ROWS = 2_000
ACCEPTED = 1e-4
"""A fit as bad as this comes once in ten thousand times; seeds are fixed."""
# One likely token, many that are together as likely, some rare ones; ids are not ranks.
RANKED = [3.4, *(0.25 - 0.01 * rank for rank in range(25)), -2.0, -2.1, -2.2]
LOGITS = [RANKED[(token * 11 + 5) % len(RANKED)] for token in range(len(RANKED))]


def options(**given_options: Any) -> Sampling:
    """Return the plain options with some of them set."""
    return replace(PLAIN, **given_options)


def ints(array: mx.array) -> list[int]:
    """Return a one-dimensional array as plain integers."""
    values = array.tolist()
    assert isinstance(values, list)
    return [value for value in values if isinstance(value, int)]


def tokens_of(logits: mx.array, draws: Sequence[Draw]) -> list[int]:
    """Return the sampled tokens as plain integers."""
    return ints(sample(logits, draws))


def keys_of(positions: int) -> mx.array:
    """Return the plain stream's keys, uint32 [positions, 2]."""
    draws = [(PLAIN.seed, 0, position, Purpose.SAMPLE) for position in range(positions)]
    words = [draw_key(seed=s, choice=c, position=p, purpose=u) for s, c, p, u in draws]
    return mx.array(words, dtype=mx.uint32)


def draw_many(
    logits: Sequence[float],
    sampling: Sampling,
    draws: int = DRAWS,
    *,
    hopeful: bool = False,
    **options: Any,
) -> list[int]:
    """Return the tokens at the positions 0, 1, 2, ...; `options` goes into each `Draw`."""
    rows = mx.broadcast_to(mx.array([list(logits)], dtype=mx.float32), (ROWS, len(logits)))
    return [
        token
        for start in range(0, draws, ROWS)
        for token in ints(
            sample(
                rows,
                [Draw(sampling, start + row, **options) for row in range(ROWS)],
                hopeful=hopeful,
            )
        )
    ]


def counts_of(tokens: Sequence[int], size: int) -> list[int]:
    """Return how often each token was drawn."""
    counter = Counter(tokens)
    return [counter[token] for token in range(size)]
