"""Exclude top choices: at some positions the likeliest tokens are left out, but for the last one.

Invariants:
- Probabilities are those of the tokens that the cuts before left, normalised. A top choice is a
  token whose probability reaches the threshold; all of them are dropped but the least likely, of
  equals the one with the highest id. So with fewer than two top choices nothing happens.
- A position at which an id that ends the stream (end of sequence, stop token) would be dropped is
  left alone: to drop the end makes a stream run on, to drop its rivals makes it end early.
- A row that is left alone keeps its scores bit for bit, whatever its neighbours ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxd_worker.engine.sampling.weights import unit_sum


@dataclass(frozen=True, slots=True)
class Ends:
    """The ids that end each row's stream, and their logits; filled up with logits of -inf."""

    ids: mx.array
    """uint32 [S, E], E at least 1."""
    logits: mx.array
    """float32 [S, E]."""


def without_top_choices(
    scores: mx.array, logits: mx.array, ids: mx.array, *, thresholds: mx.array, ends: Ends
) -> mx.array:
    """Return the scores with -inf for what is dropped, lazy.

    scores: float32 [S, K], (logit - row maximum) / T, -inf where a cut before has dropped a token.
    logits: [S, K], what ranks them. ids: uint32 [S, K] or [1, K]. thresholds: [S, 1], inf for a row
    to leave alone; 0 counts every token that is left as a top choice.
    """
    weights = mx.exp(scores)
    tops = (scores > -mx.inf) & (weights >= thresholds * unit_sum(weights))
    least = mx.min(mx.where(tops, logits, mx.inf), axis=-1, keepdims=True)
    equals = tops & (logits == least)
    last = mx.max(mx.where(equals, ids, 0), axis=-1, keepdims=True)
    spared = mx.any(_before(ends.logits, ends.ids, least, last), axis=-1, keepdims=True)
    dropped = _before(logits, ids, least, last) & ~spared
    return mx.where(dropped, -mx.inf, scores)


def _before(logits: mx.array, ids: mx.array, least: mx.array, last: mx.array) -> mx.array:
    """Return what ranks before the token `last` with the logit `least`."""
    return (logits > least) | ((logits == least) & (ids < last))
