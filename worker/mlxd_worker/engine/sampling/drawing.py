"""From a step's logits to plain values: every row's token, and its log-probabilities where asked.

Invariants:
- One sync with the host for all rows, their log-probabilities and whatever else the step evaluates.
- A nucleus (top-p without top-k) is first looked for among the best 1024 tokens; only rows that
  have a wider one are drawn again, over all of the vocabulary, in a second sync. Both give the same
  token. That is for a CPU, where sorting is dear and a sync is cheap; elsewhere all is sorted.
- A watched row is drawn for once more, in the same sync, with its token's score lowered by what
  makes a near tie. The sampler judges itself, so cuts count. Other rows pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

import mlx.core as mx

from mlxd_worker.engine.request import PositionLogprobs
from mlxd_worker.engine.sampling.logprobs import logprobs_of
from mlxd_worker.engine.sampling.sampler import TOKEN_WIDE, Draw, sample
from mlxd_worker.kernels.device import runs_cpu

DRAWN_KEPT_MAX: Final = 1 << 12
"""Tokens whose plain draw is kept, an object of 60 bytes each: most of a text is of fewer."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for one row: a token, or TOKEN_INVALID or TOKEN_NONE of the sampler."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    """The token's, where the row asks for them."""
    near_tie: bool = False
    """Whether another token was too near to call; only found out of draws that are watched."""


@lru_cache(maxsize=DRAWN_KEPT_MAX)
def drawn_alone(token_id: int) -> Drawn:
    """Return what was drawn where nothing was asked but the token: for one token one object."""
    return Drawn(token_id)


def draw_all(
    logits: mx.array,
    draws: Sequence[Draw],
    logprobs_counts: Sequence[int | None],
    *,
    along: Sequence[mx.array] = (),
) -> list[Drawn]:
    """Return what is drawn from each row of float32 [N, V] logits, evaluated.

    logprobs_counts: how many of the best tokens' log-probabilities a row wants beside its own, None
    for none at all. along: what else the step has to evaluate, in the same sync.
    """
    hopeful = runs_cpu()
    drawn = _evaluate(logits, draws, logprobs_counts, along, hopeful=hopeful)
    wide = [row for row, result in enumerate(drawn) if result.token_id == TOKEN_WIDE]
    if wide:
        rest = logits[mx.array(wide, dtype=mx.uint32)]
        again = [draws[row] for row in wide], [logprobs_counts[row] for row in wide]
        for row, result in zip(wide, _evaluate(rest, *again, hopeful=False), strict=True):
            drawn[row] = result
    return drawn


def _evaluate(
    logits: mx.array,
    draws: Sequence[Draw],
    logprobs_counts: Sequence[int | None],
    along: Sequence[mx.array] = (),
    *,
    hopeful: bool,
) -> list[Drawn]:
    tokens = sample(logits, draws, hopeful=hopeful)
    logprobs = logprobs_of(logits, tokens, logprobs_counts)
    watched = [row for row, draw in enumerate(draws) if draw.watched]
    rivals = _rivals(logits, tokens, draws, watched, hopeful=hopeful) if watched else None
    own = [] if logprobs is None else logprobs.arrays()
    mx.eval(tokens, own, [] if rivals is None else rivals, list(along))
    token_ids = cast("list[int]", tokens.tolist())
    logprobs_by_row = {} if logprobs is None else logprobs.to_values(token_ids)
    rival_ids = [] if rivals is None else cast("list[int]", rivals.tolist())
    rival_of = dict(zip(watched, rival_ids, strict=True))
    return [
        _make_drawn(token_id, logprobs_by_row.get(row), rival_of.get(row, token_id))
        for row, token_id in enumerate(token_ids)
    ]


def _rivals(
    logits: mx.array,
    tokens: mx.array,
    draws: Sequence[Draw],
    watched: Sequence[int],
    *,
    hopeful: bool,
) -> mx.array:
    """Return what the watched rows would draw if their tokens' scores were a little lower, lazy."""
    if len(watched) < len(draws):
        at = mx.array(list(watched), dtype=mx.uint32)
        logits, tokens = logits[at], tokens[at]
    return sample(logits, [draws[row] for row in watched], hopeful=hopeful, against=tokens)


def _make_drawn(token_id: int, logprobs: PositionLogprobs | None, rival_id: int) -> Drawn:
    if rival_id == TOKEN_WIDE:  # then both have to be drawn from all of the vocabulary
        return Drawn(TOKEN_WIDE)
    return Drawn(token_id, logprobs, near_tie=rival_id != token_id)
