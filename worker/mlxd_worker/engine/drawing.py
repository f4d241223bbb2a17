"""From a step's logits to plain values: every row's token, and its log-probabilities where asked.

Invariants:
- One sync with the host for all rows, their log-probabilities and whatever else the step evaluates.
- A nucleus (top-p without top-k) is first looked for among the best 1024 tokens; only rows that
  have a wider one are drawn again, over all of the vocabulary, in a second sync. Both give the same
  token. That is for a CPU, where sorting is dear and a sync is cheap; elsewhere all is sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxd_worker.engine.logprobs import logprobs_of
from mlxd_worker.engine.request import PositionLogprobs
from mlxd_worker.engine.sampler import TOKEN_WIDE, Draw, sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for one row: a token, or TOKEN_INVALID or TOKEN_NONE of the sampler."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    """The token's, where the row asks for them."""


def draw_all(
    logits: mx.array,
    draws: Sequence[Draw],
    asked: Sequence[int | None],
    *,
    along: Sequence[mx.array] = (),
) -> list[Drawn]:
    """Return what is drawn from each row of float32 [N, V] logits, evaluated.

    asked: how many of the best tokens' log-probabilities a row wants beside its own, None for none
    at all. along: what else the step has to evaluate, in the same sync.
    """
    hopeful = mx.default_device() == mx.Device(mx.cpu)
    drawn = _evaluated(logits, draws, asked, along, hopeful=hopeful)
    wide = [row for row, given in enumerate(drawn) if given.token_id == TOKEN_WIDE]
    if wide:
        rest = logits[mx.array(wide, dtype=mx.uint32)]
        again = [draws[row] for row in wide], [asked[row] for row in wide]
        for row, given in zip(wide, _evaluated(rest, *again, hopeful=False), strict=True):
            drawn[row] = given
    return drawn


def _evaluated(
    logits: mx.array,
    draws: Sequence[Draw],
    asked: Sequence[int | None],
    along: Sequence[mx.array] = (),
    *,
    hopeful: bool,
) -> list[Drawn]:
    tokens = sample(logits, draws, hopeful=hopeful)
    logprobs = logprobs_of(logits, tokens, asked)
    mx.eval(tokens, [] if logprobs is None else logprobs.arrays(), list(along))
    token_ids = cast("list[int]", tokens.tolist())
    told = {} if logprobs is None else logprobs.told(token_ids)
    return [Drawn(token_id, told.get(row)) for row, token_id in enumerate(token_ids)]
