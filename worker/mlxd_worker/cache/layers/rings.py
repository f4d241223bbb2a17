"""What the rings of a sliding window hold: positions, where they are written, who sees them."""

from collections.abc import Sequence

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Group
from mlxd_worker.cache.layers.attention import additive
from mlxd_worker.cache.layers.store import scatter, start_at, write_block


def ring_of(arrays: Sequence[mx.array]) -> int:
    """Return the columns of each row of an arena."""
    return arrays[0].shape[2]


def scatter_last(arrays: list[mx.array], group: Group, tokens: Sequence[mx.array]) -> None:
    """Write a batch's tokens `[m, kv_heads, n, head_dim]`, each row's at its own positions, lazy.

    Of more tokens than the ring has columns only the last find room.
    """
    ring = ring_of(arrays)
    columns = group.write_positions[:, -ring:] % ring
    scatter(arrays, group.write_slots, columns, (new[:, :, -ring:] for new in tokens))


def write_positions(
    arrays: list[mx.array], slot: int, first: int, tokens: Sequence[mx.array]
) -> None:
    """Write `[1, kv_heads, n, head_dim]`, n <= ring, as the positions from `first` on, lazy."""
    ring, count = ring_of(arrays), tokens[0].shape[2]
    column = first % ring
    fits = min(count, ring - column)
    write_block(arrays, start_at(slot, column), (new[:, :, :fits] for new in tokens))
    if fits < count:
        write_block(arrays, start_at(slot, 0), (new[:, :, fits:] for new in tokens))


def sliding_mask(window: int, first: mx.array, held: int, width: int, dtype: mx.Dtype) -> mx.array:
    """Return `[rows, 1, width, held + width]` for rings before the position `first` [rows].

    The first `held` columns are the ring's, which has as many as the window; the others are the
    positions from `first` on.
    """
    positions = wrapping_positions(window, first, held, width)[:, None, None, :]
    asking = (first[:, None] + mx.arange(width, dtype=mx.int32))[:, None, :, None]
    hidden = (positions < 0) | (positions > asking) | (positions <= asking - window)
    return additive(hidden, dtype)


def wrapping_positions(ring: int, first: mx.array, held: int, width: int) -> mx.array:
    """Return the positions `[rows, held + width]` of the same columns; negative: none."""
    first = first[:, None]
    # The latest position before `first` that falls on the column.
    old = first - ring + (mx.arange(held, dtype=mx.int32) - first) % ring
    return mx.concatenate([old, first + mx.arange(width, dtype=mx.int32)], axis=1)
