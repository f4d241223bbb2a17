"""What the rings of a sliding window hold: positions, copies out of them, blocks put into them."""

import mlx.core as mx

from mlxd_worker.cache.attention import additive


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


def put(array: mx.array, slot: int, column: int, block: mx.array) -> mx.array:
    """Return an arena's array with `block` written from a slot's column on."""
    return mx.slice_update(array, block, mx.array([slot, column], dtype=mx.int32), axes=(0, 2))


def ring_copy(array: mx.array, slot: int) -> mx.array:
    """Return one row's ring as memory of its own, evaluated."""
    # Gathered, not sliced, and evaluated: a view would make the write that follows copy the arena.
    row = mx.take(array, mx.array([slot]), axis=0)
    mx.eval(row)
    return row


def columns_copy(array: mx.array, slot: int, first: int, count: int) -> mx.array:
    """Return `count` columns of one row from `first` on, around the ring, as memory of their own.

    Two parts joined are always copied; a slice, even `mx.contiguous` of one, may share the arena,
    and gathering columns is four times slower.
    """
    ring = array.shape[2]
    row = slice(slot, slot + 1)
    if count < 2:
        columns = mx.arange(first, first + count, dtype=mx.int32) % ring
        return mx.take(array[row], columns, axis=2)
    cut = ring - first if first + count > ring else count // 2
    second = (first + cut) % ring
    return mx.concatenate(
        [array[row, :, first : first + cut], array[row, :, second : second + count - cut]], axis=2
    )
