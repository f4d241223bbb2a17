"""What a slot's next row finds in it: numbers alone, and no more is cleared than that takes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_worker.cache.arenas.judged import JudgedSlots
from mlxd_worker.cache.base import ArenaId, Clear, Close, Place, Reuse, RowId
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches

FIRST, SECOND = ArenaId(0), ArenaId(1)
PLACE = Place(FIRST, 256, 1)
HELD_TOKENS, CONTEXT = 100, 256


def test_what_was_judged_stays() -> None:
    """Once: the slot's next row says anew what it holds."""
    judged = JudgedSlots(in_place=False)
    judged.note(PLACE, HELD_TOKENS)

    assert judged.clear_less([Clear(PLACE)]) == [Clear(PLACE, HELD_TOKENS)]
    assert judged.clear_less([Clear(PLACE)]) == [Clear(PLACE)]


def test_in_place_nothing_of_it_is_cleared() -> None:
    """Kernels read no more than a row's own tokens."""
    judged = JudgedSlots(in_place=True)
    judged.note(PLACE, HELD_TOKENS)

    assert judged.clear_less([Clear(PLACE)]) == []
    assert judged.clear_less([Clear(PLACE)]) == [Clear(PLACE)]


def test_a_spare_is_known_by_its_new_name() -> None:
    """What its slots hold is as it was; of one that closed nothing is known."""
    judged = JudgedSlots(in_place=False)
    judged.note(PLACE, HELD_TOKENS)
    reuse = Reuse(FIRST, SECOND, capacity=256, slots=2)
    renamed = Place(SECOND, 256, 1)

    assert judged.clear_less([reuse, Clear(renamed)]) == [reuse, Clear(renamed, HELD_TOKENS)]

    judged.note(renamed, HELD_TOKENS)
    assert judged.clear_less([Close(SECOND), Clear(renamed)]) == [Close(SECOND), Clear(renamed)]


@pytest.fixture
def caches() -> RowCaches:
    """One layer's caches, of which arenas are kept; a row has just been in the only one."""
    layer = KVCache(kv_heads=1, head_dim=4, dtype=mx.float32)
    caches = RowCaches([layer], context_max=CONTEXT, rows_max=2, keeps_spares=True)
    assert caches.join(RowId(0), tokens=HELD_TOKENS)
    return caches


def fill(caches: RowCaches, value: float, *, beyond: float) -> None:
    """Have the row hold one value, and what lies beyond another."""
    (layer,) = caches.layers
    assert isinstance(layer, KVCache)
    place = caches.table.place(RowId(0))
    caches.contents.appending(RowId(0), 0, HELD_TOKENS)
    arrays = layer.lend(place.arena)
    for array in arrays:
        array[place.slot, :, :HELD_TOKENS] = value
        array[place.slot, :, HELD_TOKENS:] = beyond
    layer.settle(place.arena, arrays)


def test_beyond_what_was_judged_a_row_finds_zeros(caches: RowCaches) -> None:
    """What it held is not written again; what passes may have left behind it is gone."""
    fill(caches, 3.0, beyond=mx.nan)
    caches.leave(RowId(0), sound=True)

    assert caches.join(RowId(1), tokens=8)

    slot = caches.table.place(RowId(1)).slot
    for array in caches.arrays().values():
        assert (array[slot, :, :HELD_TOKENS] == 3.0).all()
        assert (array[slot, :, HELD_TOKENS:] == 0.0).all()


def test_of_a_row_that_nobody_judged_nothing_stays(caches: RowCaches) -> None:
    """All of its slot is zeroed for the next one."""
    fill(caches, mx.nan, beyond=mx.nan)
    caches.leave(RowId(0), sound=False)

    assert caches.join(RowId(1), tokens=8)

    slot = caches.table.place(RowId(1)).slot
    for array in caches.arrays().values():
        assert (array[slot] == 0.0).all()
