"""What all kinds of layers keep by slot alike: bytes, moves, and arrays that are lent."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import ArenaId, Clear, LayerCache, Move, Open, Place
from mlxd_worker.cache.changes import carry_out
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.latent import LatentCache
from mlxd_worker.cache.layers.quantized import QuantizedKVCache
from mlxd_worker.cache.layers.rotating import RotatingCache
from mlxd_worker.cache.layers.slots import slot_caches
from mlxd_worker.cache.layers.store import SliceableCache
from tests.support.mlx_memory import live_nbytes

CAPACITY, SLOTS = 1024, 32
FIRST, SECOND = ArenaId(1), ArenaId(2)

SLICEABLE: dict[str, Callable[[], SliceableCache]] = {
    "standard": lambda: KVCache(kv_heads=2, head_dim=32, dtype=mx.float32),
    "values-of-another-width": lambda: KVCache(
        kv_heads=2, head_dim=32, value_dim=16, dtype=mx.float16
    ),
    "quantized": lambda: QuantizedKVCache(
        kv_heads=2, head_dim=64, dtype=mx.float16, kv=KVFormat.Q8
    ),
    "latent": lambda: LatentCache(entry_dim=96, latent_dim=64, dtype=mx.float32),
}


def ring() -> RotatingCache:
    """Return a cache whose slots are shorter than an arena's capacity."""
    return RotatingCache(kv_heads=2, head_dim=32, window=600, dtype=mx.float32)


KINDS: dict[str, Callable[[], LayerCache]] = {**SLICEABLE, "rotating": ring}


def fill(cache: LayerCache) -> None:
    """Fill each slot with its own number, from 1 on, where it lies."""
    for array in cache.arrays().values():
        for slot in range(array.shape[0]):
            array[slot] = slot + 1
    mx.eval(cache.arrays())


def holds(cache: LayerCache, arena: ArenaId, slot: int, number: int) -> bool:
    """Tell whether a slot holds this number everywhere, in all of an arena's arrays."""
    arrays = [array for name, array in cache.arrays().items() if name.endswith(f".{arena}")]
    return bool(arrays) and all(mx.all(array[slot] == number).item() for array in arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_takes_what_is_reckoned(kind: str) -> None:
    """The bytes of an arena are its slots' and its arrays', and go when it is closed."""
    cache = KINDS[kind]()
    before = live_nbytes()

    carry_out([Open(FIRST, CAPACITY, SLOTS)], [cache])

    assert cache.nbytes == SLOTS * cache.slot_nbytes(CAPACITY)
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
    assert 0 <= mx.get_active_memory() - before - cache.nbytes < 64 << 10
    cache.reuse(FIRST, SECOND)
    assert {name.rpartition(".")[2] for name in cache.arrays()} == {str(SECOND)}
    cache.close(SECOND)
    assert cache.nbytes == 0
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("kind", KINDS)
def test_changes_are_lazy(kind: str) -> None:
    """A layer evaluates nothing of a change by itself, so nobody waits for it alone."""
    cache = KINDS[kind]()
    carry_out([Open(FIRST, CAPACITY, SLOTS)], [cache])
    source, target = (Place(arena, CAPACITY, 2) for arena in (FIRST, SECOND))
    before = live_nbytes()

    cache.open(SECOND, capacity=CAPACITY, slots=SLOTS)
    cache.clear(source)
    cache.move(source, target, cache.lift(source))
    cache.write(source, 0, 9, cache.read(target, 0, 9))

    assert max(mx.get_peak_memory() - before, 0) < 1 << 10
    assert cache.nbytes == 2 * SLOTS * cache.slot_nbytes(CAPACITY)


@pytest.mark.parametrize("target", [FIRST, SECOND], ids=["same-arena", "another"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_move_takes_the_room_of_rows(kind: str, target: ArenaId) -> None:
    """A row moves whole and alone: the arenas stay where they are, and other slots as they are."""
    cache = KINDS[kind]()
    carry_out([Open(arena, CAPACITY, SLOTS) for arena in (FIRST, SECOND)], [cache])
    fill(cache)
    before = live_nbytes()

    move = Move(Place(FIRST, CAPACITY, 8), Place(target, CAPACITY, 3))
    carry_out([move, Clear(Place(FIRST, CAPACITY, 5))], [cache])

    assert mx.get_peak_memory() - before < 4 * cache.slot_nbytes(CAPACITY)
    assert mx.get_active_memory() - before < cache.slot_nbytes(CAPACITY)
    assert holds(cache, target, 3, 9)
    assert all(holds(cache, FIRST, *held) for held in ((4, 5), (5, 0), (8, 9)))


@pytest.mark.parametrize("kind", SLICEABLE)
def test_what_is_lent_is_nobody_elses(kind: str) -> None:
    """Arrays that are lent leave nothing behind, and all of them come back by their names."""
    cache = SLICEABLE[kind]()
    cache.open(FIRST, capacity=CAPACITY, slots=2)
    fill(cache)
    names, nbytes = list(cache.arrays()), cache.nbytes

    lent = cache.lend(FIRST)

    assert (cache.nbytes, cache.arrays()) == (0, {})
    with pytest.raises(AssertionError, match="as they were lent"):
        cache.settle(FIRST, lent[1:])
    cache.settle(FIRST, lent)
    assert (list(cache.arrays()), cache.nbytes) == (names, nbytes)
    assert holds(cache, FIRST, 1, 2)


def test_only_what_can_be_cut_goes_by_slots() -> None:
    """A pass by slots writes beside rows that wait: in a ring that would be seen."""
    layers = [make() for make in SLICEABLE.values()]

    assert slot_caches(layers) == tuple(layers)
    assert slot_caches([*layers, ring()]) is None
    assert slot_caches([*layers, None]) is None
