"""Log-probabilities of drawn tokens and of the best ones, under the logits as the model gave them.

Invariants:
- They are of the whole vocabulary, in float32, before bias, penalties, masks, temperature and cuts:
  what the model thinks, not what the sampler makes of it.
- Only rows that ask are computed, in the same lazy graph as the draw: there is no sync of its own.
- Equal tokens are ranked by id, lowest first. A row's values do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxd_worker.engine.request import PositionLogprobs, TokenLogprob
from mlxd_worker.engine.sampling.ranking import best_ids
from mlxd_worker.kernels.picking import pick


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities of one step, for the rows that ask; arrays may still be lazy."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    """How many of the best tokens each of them asks for."""
    chosen: mx.array
    """float32 [A], one for each of `rows`."""
    top_ids: mx.array | None
    """uint32 [A, K], best first; None if no row asks for any."""
    top: mx.array | None
    """float32 [A, K]."""

    def arrays(self) -> list[mx.array]:
        """Return what the step has to evaluate."""
        return [array for array in (self.chosen, self.top_ids, self.top) if array is not None]

    def to_values(self, drawn: Sequence[int]) -> dict[int, PositionLogprobs]:
        """Return plain values by row; `drawn` are the tokens of all rows. Evaluated before."""
        chosen = cast("list[float]", self.chosen.tolist())
        none: list[list[int]] = [[] for _ in self.rows]
        ids = none if self.top_ids is None else cast("list[list[int]]", self.top_ids.tolist())
        values = cast("list[list[float]]", none if self.top is None else self.top.tolist())
        return {
            row: PositionLogprobs(
                TokenLogprob(drawn[row], chosen[index]),
                tuple(map(TokenLogprob, ids[index][:count], values[index][:count])),
            )
            for index, (row, count) in enumerate(zip(self.rows, self.counts, strict=True))
        }


def logprobs_of(
    logits: mx.array, tokens: mx.array, logprobs_counts: Sequence[int | None]
) -> Logprobs | None:
    """Return the log-probabilities of drawn tokens, lazy; None where no row asks.

    logits: raw, float32 [N, V]. tokens: int32 [N]; a negative one, of a row that fails, gets some
    value. asked: how many of the best tokens each row wants, None for none of it all.
    """
    asking = [(row, count) for row, count in enumerate(logprobs_counts) if count is not None]
    if not asking:
        return None
    rows, counts = zip(*asking, strict=True)
    if len(rows) < logits.shape[0]:
        at = mx.array(rows, dtype=mx.uint32)
        logits, tokens = logits[at], tokens[at]
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    place = mx.maximum(tokens, 0)[:, None]
    chosen = pick(logits, place) - normaliser
    width = min(max(counts), logits.shape[1])
    top_ids = best_ids(logits, width) if width else None
    top = None if top_ids is None else pick(logits, top_ids) - normaliser
    return Logprobs(rows, counts, chosen[:, 0], top_ids, top)
