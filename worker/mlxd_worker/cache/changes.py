"""What the row table has decided, carried out in all layers: few submissions, whatever the layers.

Invariants:
- A layer notes each change and leaves the work lazy; all layers' work is evaluated together. So the
  host waits for the device once, and once more where rows move; not at all where no array changes.
- A row that moves is copied out before anything is written: an arena that is written while it is
  read would be copied whole. At most `LIFTED_NBYTES` are out of their arenas at once, or what one
  layer has of the rows; where there are more, layers go in several parts.
- When an arena is allocated, those that close for it have gone, in the layers of its part.
- It waits for what it has evaluated. Behind work that still runs MLX writes into a copy of an
  array, not in place: 64 slots of which one is written twice take the room of 128 (decision 0061).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

import mlx.core as mx

from mlxd_worker.cache.base import (
    Change,
    Clear,
    Close,
    Free,
    LayerCache,
    Move,
    Open,
    Place,
    Reuse,
)

LIFTED_NBYTES: Final = 32 << 20
"""As much as MLX's own pool holds on a CPU: 32 layers of 8 heads of 128 halves, 256 tokens."""

Lifted = dict[Place, tuple[mx.array, ...]]
L = TypeVar("L")


def carry_out(
    changes: Sequence[Change],
    layers: Sequence[LayerCache],
    *,
    lifted_nbytes: int = LIFTED_NBYTES,
) -> None:
    """Carry changes out in all layers, in order; they have taken effect when it returns.

    lifted_nbytes: what may be out of its arena at once; one layer goes in any case.
    """
    for part in _without_second_moves(changes):
        sources = [change.source for change in part if isinstance(change, Move)]
        rows_nbytes = partial(_nbytes_at, sources)
        for some in in_parts(layers, rows_nbytes, nbytes_max=lifted_nbytes):
            _carry_out_together(part, some, sources)


def _carry_out_together(
    changes: Sequence[Change], layers: Sequence[LayerCache], sources: Sequence[Place]
) -> None:
    lifted: list[Lifted] = [{place: layer.lift(place) for place in sources} for layer in layers]
    if sources:
        wait([list(rows.values()) for rows in lifted])
    for layer, rows in zip(layers, lifted, strict=True):
        for change in changes:
            _make(change, layer, rows)
    if any(isinstance(change, Open | Move | Clear) for change in changes):
        evaluate(layers)


def _nbytes_at(places: Sequence[Place], layer: LayerCache) -> int:
    return sum(layer.slot_nbytes(place.capacity) for place in places)


def _make(change: Change, layer: LayerCache, lifted: Lifted) -> None:
    match change:
        case Open(arena, capacity, slots):
            layer.open(arena, capacity=capacity, slots=slots)
        case Reuse(spare, arena):
            layer.reuse(spare, arena)
        case Close(arena):
            layer.close(arena)
        case Move(source, target):
            layer.move(source, target, lifted[source])
        case Clear(place, start):
            layer.clear(place, start)
        case Free(place):
            layer.free(place)


def _without_second_moves(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Yield the changes in parts; within a part, no source is the target of an earlier move."""
    part: list[Change] = []
    written: set[Place] = set()
    for change in changes:
        if isinstance(change, Move) and change.source in written:
            yield part
            part, written = [], set()
        if isinstance(change, Move):
            written.add(change.target)
        elif isinstance(change, Clear):
            written.add(change.place)
        part.append(change)
    if part:
        yield part


def in_parts(
    layers: Iterable[L],
    nbytes_of: Callable[[L], int],
    *,
    nbytes_max: int = LIFTED_NBYTES,
) -> Iterator[list[L]]:
    """Yield layers, or what they hold, in parts by the bytes of each, up to a limit."""
    some: list[L] = []
    nbytes = 0
    for layer in layers:
        own = nbytes_of(layer)
        if some and nbytes + own > nbytes_max:
            yield some
            some, nbytes = [], 0
        some.append(layer)
        nbytes += own
    if some:
        yield some


def evaluate(layers: Sequence[LayerCache]) -> None:
    """Evaluate what layers have of rows, all in one submission, and wait for it."""
    wait([list(layer.arrays().values()) for layer in layers])


def wait_for_all() -> None:
    """Wait for all that was ever dispatched here, until nothing of it refers to any array."""
    mx.synchronize()


def wait(arrays: object) -> None:
    """Evaluate arrays, all in one submission, and wait for them."""
    mx.eval(arrays)
