"""Rows that are put back behind what is under way: which positions, and what is saved from it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.kept.stacks import LayerState
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from tests.worker.in_place import InPlace

HEADS, WIDTH = 2, 8
TOKENS, TARGET = 20, 12
OURS, THEIRS = RowId(1), RowId(2)


class Rows:
    """Two rows of layers that put in place: each holds its own number in every position."""

    def __init__(self) -> None:
        self.layers: list[KVCache] = [
            InPlace(kv_heads=HEADS, head_dim=WIDTH, dtype=mx.float32) for _ in range(2)
        ]
        self.caches = RowCaches(
            self.layers, context_max=1024, rows_max=4, bounded_shapes=True, in_place=True
        )
        self.contents = self.caches.contents
        for row in (OURS, THEIRS):
            assert self.caches.join(row, tokens=TOKENS)
            block = mx.full((1, HEADS, TOKENS, WIDTH), float(row))
            for layer in self.layers:
                layer.write(self.caches.table.place(row), 0, TOKENS, (block, block))
            self.contents.appending(row, 0, TOKENS)

    def keep(self, row: RowId, start: int = 0) -> Snapshot:
        """Return a lazy snapshot of a row from `start` on."""
        snapshot = self.contents.snapshot(row, Kind.STANDARD, start)
        assert snapshot is not None
        return snapshot

    def read(self, row: RowId, start: int, stop: int) -> set[float]:
        """Return what numbers a row's layers hold in [start, stop)."""
        place = self.caches.table.place(row)
        return numbers([layer.read(place, start, stop) for layer in self.layers])


def numbers(states: list[LayerState] | tuple[LayerState, ...]) -> set[float]:
    """Return what numbers there are in layers' states."""
    arrays = (array for state in states for array in state)
    return {value for array in arrays for value in np.array(array).ravel().tolist()}


@pytest.mark.parametrize("owned", [False, True])
def test_no_more_is_put_than_the_row_stands_at(*, owned: bool) -> None:
    """What it overwrites of the row's own is copied out before; what lies beyond stays lazy."""
    rows = Rows()
    before, beyond = rows.keep(OURS), rows.keep(OURS, TARGET)
    source = rows.keep(THEIRS)
    if owned:
        rows.contents.book.copy_out([source])
    assert rows.contents.restore(OURS, [source], TARGET)

    assert rows.contents.offset(OURS) == TARGET
    assert rows.read(OURS, 0, TARGET) == {float(THEIRS)}
    assert rows.read(OURS, TARGET, TOKENS) == {float(OURS)}
    assert rows.read(THEIRS, 0, TOKENS) == {float(THEIRS)}
    assert (before.lazy, beyond.lazy, source.lazy) == (False, True, not owned)
    for snapshot, row in ((before, OURS), (beyond, OURS), (source, THEIRS)):
        assert numbers(snapshot.read()) == {float(row)}
        snapshot.close()


def test_what_a_row_has_itself_is_not_put() -> None:
    """It goes back over its own positions for nothing, and only what follows them is put."""
    rows = Rows()
    own, rest = rows.keep(OURS), rows.keep(THEIRS)
    first, cut = own.split(TARGET // 2)
    others, theirs = rest.split(TARGET // 2)
    assert first is not None
    assert cut is not None
    assert theirs is not None
    assert rows.contents.restore(OURS, [first, theirs], TARGET)

    assert rows.read(OURS, 0, TARGET // 2) == {float(OURS)}
    assert rows.read(OURS, TARGET // 2, TARGET) == {float(THEIRS)}
    assert (first.lazy, cut.lazy) == (True, False)
    assert numbers(cut.read()) == {float(OURS)}
    for snapshot in (first, cut, theirs, others):
        if snapshot is not None:
            snapshot.close()
    assert rows.contents.book.live == 0
