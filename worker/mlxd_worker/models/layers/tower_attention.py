"""Attention of patches to each other, in parts: however many they are, scores are few at once.

Invariants:
- No more than `SCORES_MAX` scores are there at once, which is what the fit counts.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlxd_models.families.sighted.tower import SCORES_MAX


def attend_bounded(
    queries: mx.array, keys: mx.array, values: mx.array, *, scores_max: int = SCORES_MAX
) -> mx.array:
    """Return what queries `[N, heads, length, width]` read of their own N, all of it.

    Several windows at once, or some queries of one: never more scores than `scores_max`, but for
    those of one query.
    """
    count, heads, length, width = queries.shape
    scale = 1 / math.sqrt(width)
    each = heads * length * length
    if count * each <= scores_max:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
    windows = max(scores_max // each, 1)
    queries_max = length if each <= scores_max else max(scores_max // (heads * length), 1)
    parts = []
    for first in range(0, count, windows):
        own = slice(first, first + windows)
        read = []
        for begin in range(0, length, queries_max):
            some = queries[own, :, begin : begin + queries_max]
            read.append(
                mx.fast.scaled_dot_product_attention(some, keys[own], values[own], scale=scale)
            )
            mx.eval(read[-1])
        parts.append(mx.concatenate(read, axis=2))
    return mx.concatenate(parts, axis=0)
