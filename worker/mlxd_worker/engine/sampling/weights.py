"""Sums of probabilities that come out the same in any order of adding.

Invariants:
- A weight is a token's probability relative to the row's best one: 1 at most.
- Weights are added up as integers, in units of 2^-40. So a sum depends neither on the order of the
  tokens, nor on how wide a support is filled up, nor on how a device cuts a scan into pieces; what
  is decided by a sum (top-p, xtc) is decided alike on every way of drawing.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

_UNIT: Final = 2.0**-40
"""A vocabulary of 2^23 tokens still adds up below 2^63."""


def unit_sum(weights: mx.array) -> mx.array:
    """Return the sum of each row of float32 [S, K] weights, float32 [S, 1], lazy."""
    return _weight(mx.sum(_units(weights), axis=-1, keepdims=True))


def unit_sums_before(weights: mx.array) -> mx.array:
    """Return, for each of float32 [S, K] weights, the sum of those before it, [S, K], lazy."""
    return _weight(mx.cumsum(_units(weights), axis=-1, inclusive=False))


def _units(weights: mx.array) -> mx.array:
    return (weights * (1 / _UNIT)).astype(mx.uint64)


def _weight(units: mx.array) -> mx.array:
    return units.astype(mx.float32) * _UNIT
