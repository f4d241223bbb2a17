"""Changes of places in all layers: how often the host waits for them, and what they need."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlxd_worker.cache import changes
from mlxd_worker.cache.base import ArenaId, Clear, Close, Kind, LayerCache, Move, Open, Place, RowId
from mlxd_worker.cache.changes import carry_out
from mlxd_worker.cache.kept.contents import Kept
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from tests.support.counting import calls_of
from tests.support.mlx_memory import live_nbytes
from tests.worker.cache.keeping import snapshots_of

LAYERS = 12
FIRST, SECOND = ArenaId(1), ArenaId(2)


def waits(action: Callable[[], object]) -> int:
    """Return how often the host waits for the device in an action; layers never do by themselves.

    That is `test_store.py::test_changes_are_lazy`.
    """
    return calls_of(action, changes.wait)


def kv_layers(count: int = LAYERS) -> list[LayerCache]:
    """Return caches of so many layers."""
    return [KVCache(kv_heads=2, head_dim=16, dtype=mx.float32) for _ in range(count)]


def rows_of(layers: int, *, sinks: bool = False) -> RowCaches:
    """Return the caches of rows that no device is waited for yet."""
    return RowCaches(
        kv_layers(layers),
        context_max=1024,
        rows_max=32,
        bounded_shapes=not sinks,
        keeps_spares=True,
    )


def fill(row: RowId, caches: RowCaches, value: float) -> None:
    """Write a value into all of a row, in all layers."""
    place = caches.table.place(row)
    for layer in caches.layers:
        assert isinstance(layer, KVCache)
        shape = (1, layer.kv_heads, place.capacity, layer.head_dim)
        layer.write(place, 0, place.capacity, (mx.full(shape, value),) * 2)
        mx.eval(layer.arrays())


def holds(row: RowId, caches: RowCaches, value: float, *, count: int = 256) -> bool:
    """Tell whether a row's first positions hold a value, in all layers."""
    place = caches.table.place(row)
    parts = [
        part for layer in caches.layers if layer is not None for part in layer.read(place, 0, count)
    ]
    return all(mx.all(part == value).item() for part in parts)


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_row_joins_and_leaves_with_one_wait(layers: int) -> None:
    """An arena of all layers opens, a used slot is zeroed, in one wait each; leaving takes none."""
    caches = rows_of(layers)
    first, second = RowId(0), RowId(1)

    assert waits(lambda: caches.join(first, tokens=100, coming=2)) == 1
    assert waits(lambda: caches.join(second, tokens=100)) == 0  # into a slot that nobody had
    fill(first, caches, 1)
    fill(second, caches, 2)
    assert waits(lambda: caches.leave(first)) == 0
    assert waits(lambda: caches.join(RowId(2), tokens=100)) == 1
    assert holds(RowId(2), caches, 0)
    assert holds(second, caches, 2)


@pytest.mark.parametrize("crossing", [1, 8])
def test_rows_that_grow_wait_twice_however_many(crossing: int) -> None:
    """All rows that cross a class in a step are copied out together, and put down together."""
    caches = rows_of(LAYERS)
    rows = [RowId(number) for number in range(crossing)]
    for row in rows:
        caches.join(row, tokens=200, coming=crossing)
        fill(row, caches, row + 1)

    assert waits(lambda: caches.reserve_all(dict.fromkeys(rows, 300))) == 2
    assert {caches.table.capacity(row) for row in rows} == {512}
    assert all(holds(row, caches, row + 1) for row in rows)


def test_a_class_that_settles_waits_twice_a_row() -> None:
    """A row that moves for others' sake costs two waits, and nothing to move none."""
    caches = rows_of(LAYERS, sinks=True)
    for number in range(6):
        while not caches.join(RowId(number), tokens=200, coming=6 - number):
            caches.tend()
        fill(RowId(number), caches, number)
    while caches.table.moving:
        caches.tend()
    for number in range(5):
        caches.leave(RowId(number))

    assert waits(caches.tend) == 2
    assert holds(RowId(5), caches, 5)
    assert waits(caches.tend) == 0


def test_a_prefix_is_put_back_with_one_wait() -> None:
    """What former rows left is written into all layers at once, in as many parts as there are."""
    caches = rows_of(LAYERS)
    former, row = RowId(0), RowId(1)
    caches.join(former, tokens=256, coming=2)
    fill(former, caches, 7)
    kept: list[Kept] = []
    for stop in (40, 100):
        start = caches.contents.offset(former)
        caches.contents.appending(former, start, stop)
        kept.append(snapshots_of(caches.contents, former, start))
    parts = [part[Kind.STANDARD] for part in kept]
    caches.join(row, tokens=256)
    # Read of the row that still stands there: out of its arena, into the same one.
    assert waits(lambda: caches.contents.restore(row, parts[:1], 40)) <= 3
    assert holds(row, caches, 7, count=40)
    caches.leave(former)
    caches.leave(row)
    caches.join(other := RowId(2), tokens=256)

    assert waits(lambda: caches.contents.restore(other, parts, 90)) == 1
    assert holds(other, caches, 7, count=90)
    for part in parts:
        part.close()


def test_a_row_that_moves_twice_arrives() -> None:
    """A place that was written in the same call is read after that; so is one that was left."""
    layers = kv_layers(3)
    places = [Place(FIRST, 64, 0), Place(FIRST, 64, 1), Place(SECOND, 64, 0)]
    carry_out([Open(FIRST, 64, 2), Open(SECOND, 64, 1)], layers)
    for layer in layers:
        for number, place in enumerate(places):
            layer.write(place, 0, 64, (mx.full((1, 2, 64, 16), number + 1.0),) * 2)

    carry_out(
        [
            Clear(places[2]),
            Move(places[0], places[2]),
            Move(places[1], places[0]),
            Move(places[2], places[1]),
            Close(SECOND),
        ],
        layers,
    )

    for layer in layers:
        (keys, _), (moved, _) = (layer.read(place, 0, 64) for place in places[:2])
        assert mx.all(keys == 2).item()
        assert mx.all(moved == 1).item()
        assert all(name.endswith(".1") for name in layer.arrays())


def test_what_is_lifted_is_bounded() -> None:
    """Where rows are large, layers go in parts: the room of one part, and two waits for each."""
    layers = kv_layers()
    carry_out([Open(FIRST, 1024, 16), Open(SECOND, 1024, 16)], layers)
    row_nbytes = layers[0].slot_nbytes(1024)
    move = Move(Place(FIRST, 1024, 0), Place(SECOND, 1024, 0))
    three = 3 * row_nbytes
    before = live_nbytes()

    assert waits(lambda: carry_out([move], layers, lifted_nbytes=three)) == 2 * LAYERS // 3
    assert mx.get_peak_memory() - before < 4 * row_nbytes
    # One layer at a time is the least.
    assert waits(lambda: carry_out([move], layers, lifted_nbytes=1)) == 2 * LAYERS


def test_an_arena_replaces_another_without_both() -> None:
    """Those that close have gone when the one that takes their rows is allocated."""
    layers = kv_layers()
    carry_out([Open(FIRST, 1024, 4)], layers)
    row_nbytes = sum(layer.slot_nbytes(1024) for layer in layers)
    before = live_nbytes()

    move = Move(Place(FIRST, 1024, 1), Place(SECOND, 1024, 0))
    carry_out([Open(SECOND, 1024, 3), move, Close(FIRST)], layers)

    assert mx.get_peak_memory() - before < 2 * row_nbytes
    assert mx.get_active_memory() - before <= 0


def test_a_step_behind_changes_writes_in_place() -> None:
    """What was changed is nobody else's afterwards: the next write copies no arena."""
    layers = kv_layers(1)
    carry_out([Open(FIRST, 1024, 64)], layers)
    before = live_nbytes()

    carry_out([Clear(Place(FIRST, 1024, 3)), Move(*two_places())], layers)
    layers[0].write(two_places()[0], 0, 1, (mx.ones((1, 2, 1, 16)),) * 2)
    mx.eval(layers[0].arrays())

    assert mx.get_peak_memory() - before < 4 * layers[0].slot_nbytes(1024)


def two_places() -> tuple[Place, Place]:
    """Return two slots of one arena."""
    return Place(FIRST, 1024, 9), Place(FIRST, 1024, 2)
