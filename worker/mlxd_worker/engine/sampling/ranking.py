"""Which tokens are the best, in order.

Invariants:
- Equal logits are ranked by id, lowest first; -0 equals 0. So a rank is a matter of the row alone.
- What is sorted is one integer a token, its logit above its id: there are no equals, nothing is
  looked up while sorting, and a part of the order is as exact as all of it. On a CPU it takes half
  the time of sorting indices.
"""

from __future__ import annotations

import mlx.core as mx


def best_ids(logits: mx.array, width: int) -> mx.array:
    """Return the ids of the `width` best tokens, best first, uint32 [S, width], lazy.

    logits is float32 [S, V] without NaN (a row with one gets some order), width from 1 to V.
    """
    keys = _keys(logits)
    if width < logits.shape[1]:
        keys = mx.partition(keys, width - 1, axis=-1)[:, :width]
    return (mx.sort(keys, axis=-1) & 0xFFFFFFFF).astype(mx.uint32)


def _keys(logits: mx.array) -> mx.array:
    """Return int64 [S, V] that rise as tokens get worse: logits falling, then ids rising."""
    bits = (logits + 0.0).view(mx.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, in the order of the floats
    ids = mx.arange(logits.shape[1], dtype=mx.int64)[None]
    return (mx.bitwise_invert(rising).astype(mx.int64) << 32) | ids
