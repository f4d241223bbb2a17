"""What the standard cache needs at its peak: steps in place, and no copy but of one row."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from tests.support.mlx_memory import live_nbytes
from tests.worker.naive_kv import HEAD_DIM, KV_HEADS, Naive


def growth_of_steps(pair: Naive, *, hold_view: bool) -> float:
    """Return the median peak of bytes above the live ones over some decode steps."""
    growths = []
    rows = pair.caches.rows
    for _ in range(9):
        keys = next(iter(pair.kv_cache().arrays().values())) if hold_view else None
        view = None if keys is None else keys[:1]
        del keys
        if view is not None:
            mx.eval(view)
        before = live_nbytes()
        pair.append(rows, 1)
        growths.append(mx.get_peak_memory() - before)
    return statistics.median(growths)


def wide_rows(*, bounded_shapes: bool | None = None) -> Naive:
    """Return rows in one arena much larger than what a step computes."""
    cache = KVCache(kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=mx.float32)
    rows = RowCaches([cache], context_max=1024, rows_max=128, bounded_shapes=bounded_shapes)
    pair = Naive(rows)
    for number in range(64):
        pair.join(RowId(number), 1000)
        pair.append((RowId(number),), 2)
    while pair.caches.table.moving:
        pair.caches.tend()
    gc.collect()
    return pair


def test_a_step_writes_in_place() -> None:
    """A decode step needs much less than the arena; a view kept across it costs a whole copy."""
    pair = wide_rows()
    one_array = pair.caches.nbytes // 2

    in_place = growth_of_steps(pair, hold_view=False)
    copied = growth_of_steps(pair, hold_view=True)

    assert in_place < one_array / 2
    assert copied - in_place > one_array / 2


def peak_of(action: Callable[[], object]) -> int:
    """Return by how many bytes `action` exceeds what was live before it."""
    before = live_nbytes()
    action()
    return max(mx.get_peak_memory() - before, 0)  # the peak is 0 where nothing was made


def test_leaving_and_joining_copy_nothing() -> None:
    """A row that leaves a crowd needs no room, one that takes its slot that of the zeros."""
    pair = wide_rows()
    row_nbytes = pair.caches.nbytes // 64

    assert peak_of(lambda: pair.caches.leave(RowId(3))) == 0
    assert peak_of(lambda: pair.caches.join(RowId(64), tokens=1000)) < 2 * row_nbytes
    pair.keys[RowId(64)] = pair.values[RowId(64)] = pair.keys.pop(RowId(3))[:, :0]
    pair.check()


def test_moving_copies_one_row() -> None:
    """When a class moves into a smaller arena, a step needs the room of that arena and one row."""
    pair = wide_rows(bounded_shapes=True)
    row_nbytes = pair.caches.nbytes // 64
    for number in range(50):
        pair.leave(RowId(number))

    opening = peak_of(pair.caches.tend)
    moving = [peak_of(pair.caches.tend) for _ in range(13)]

    (arena,) = pair.caches.table.arenas
    assert (arena.capacity, arena.slots) == (1024, 32)
    assert opening < (32 + 3) * row_nbytes
    assert max(moving) < 3 * row_nbytes
    pair.check()


def test_sinking_copies_one_row() -> None:
    """Where slots above the last row cost nothing, rows sink into the first ones, in place."""
    pair = wide_rows(bounded_shapes=False)
    row_nbytes = pair.caches.nbytes // 64
    for number in range(50):
        pair.leave(RowId(number))

    sinking = [peak_of(pair.caches.tend) for _ in range(14)]

    (arena,) = pair.caches.table.arenas
    assert (arena.capacity, arena.slots) == (1024, 64)
    slots = [pair.caches.table.place(row).slot for row in pair.caches.rows]
    assert slots[:5] == [0, 1, 2, 3, 4]
    assert max(slots) + 1 < 2 * 14
    assert max(sinking) < 3 * row_nbytes
    pair.check()


def test_reading_and_writing_copy_no_arena() -> None:
    """What is kept of a row needs its own room, and leaves the next step in place."""
    pair = wide_rows()
    place = pair.caches.table.place(RowId(7))
    one_array = pair.caches.nbytes // 2
    kept: list[mx.array] = []

    def read() -> None:
        kept.extend(pair.kv_cache().read(place, 0, 2))
        mx.eval(kept)

    assert peak_of(read) < one_array / 64
    assert growth_of_steps(pair, hold_view=False) < one_array / 2
    pair.rewind(RowId(7), 2)

    def write() -> None:
        pair.kv_cache().write(place, 0, 2, tuple(kept))
        mx.eval(pair.kv_cache().arrays())

    written = peak_of(write)
    assert written < one_array / 64
    pair.check()


def test_opening_needs_no_more_room_than_the_arena() -> None:
    """A join that opens an arena needs just its bytes, and copies nobody."""
    caches = [KVCache(kv_heads=8, head_dim=64, dtype=mx.float32) for _ in range(4)]
    rows = RowCaches(caches, context_max=1024, rows_max=8)
    for number in range(4):
        rows.join(RowId(number), tokens=1000)
    grown = rows.join_nbytes(1000)
    before = rows.nbytes

    peak = peak_of(lambda: rows.join(RowId(4), tokens=1000))

    assert rows.nbytes - before == grown > 0
    assert peak <= grown + (64 << 10)


def test_arenas_go_with_their_owner() -> None:
    """Caches that are dropped give their memory back at once, garbage collector or not."""
    cache = KVCache(kv_heads=8, head_dim=64, dtype=mx.float32)
    before = live_nbytes()
    rows = RowCaches([cache], context_max=1024, rows_max=8)
    rows.join(RowId(0), tokens=600)
    assert mx.get_active_memory() - before >= rows.nbytes > 0

    gc.disable()
    try:
        del rows, cache
        assert mx.get_active_memory() == before
    finally:
        gc.enable()


def test_a_moved_row_leaves_no_view_of_its_arena() -> None:
    """After a class change and a move, only the arenas themselves are alive."""
    cache = KVCache(kv_heads=8, head_dim=64, dtype=mx.float32)
    before = live_nbytes()
    rows = RowCaches([cache], context_max=1024, rows_max=8)
    for number in range(5):
        while not rows.join(RowId(number), tokens=600):
            rows.tend()

    rows.reserve(RowId(0), tokens=1000)
    rows.leave(RowId(1))
    rows.tend()

    assert abs(mx.get_active_memory() - before - rows.nbytes) < 16 << 10
