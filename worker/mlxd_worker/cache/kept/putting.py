"""Rows read, to be kept, and put back; by kernels that write in place where layers have these.

Invariants:
- By kernels nobody waits: passes that are dispatched later find it there, as each runs after those
  before it.
- What they put is dispatched by itself: among the kernels of one dispatch MLX knows of no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx

from mlxd_worker.cache.base import Kind, LayerCache, Place, RowError, RowId
from mlxd_worker.cache.changes import evaluate, in_parts, wait
from mlxd_worker.cache.kept.snapshot import ReadRow, Snapshot
from mlxd_worker.cache.kept.stacks import POSITION_AXIS, LayerState, Stack, clip
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.kernels.row_copies import are_alike, copy_ranges


def putting_layers(layers: Sequence[LayerCache | None]) -> tuple[KVCache, ...]:
    """Return all layers where each of them can put by a kernel; none where one cannot."""
    able = tuple(layer for layer in layers if isinstance(layer, KVCache) and layer.puts)
    return able if len(able) == len(layers) else ()


def read_layers(
    layers: Sequence[LayerCache], place: Place, start: int, stop: int
) -> tuple[Stack, ...]:
    """Return what each layer's `read` does, stacked by one kernel for many where all have that.

    Lazy. A row that ends costs a GPU's host few calls then and few arrays, not some a layer. Layers
    of more than `LIFTED_NBYTES` go apart, so that who copies them again has no copy of all beside.
    """
    able = [layer for layer in layers if isinstance(layer, KVCache) and layer.copies]
    count = stop - start
    ranges = [layer.range_at(place, start) for layer in able]
    if len(able) < len(layers) or not are_alike(ranges):
        return tuple(layer.read(place, start, stop) for layer in layers)
    copies: list[Stack] = []
    pairs = list(zip(able, ranges, strict=True))
    for some in in_parts(pairs, lambda pair: pair[0].slot_nbytes(count)):
        copies += copy_ranges([each for _, each in some], count)
    return tuple(copies)


def reader_of(layers: Mapping[Kind, list[LayerCache]], place: Callable[[RowId], Place]) -> ReadRow:
    """Return what reads a row. No method of who has the layers: a book would hold its owner.

    Arenas in such a circle would outlive their owner until the garbage collector comes by.
    """

    def read(row: RowId, kind: Kind, start: int, stop: int) -> tuple[Stack, ...]:
        return read_layers(layers[kind], place(row), start, stop)

    return read


def sort_by_kind(parts: Sequence[Snapshot], kinds: Iterable[Kind]) -> dict[Kind, list[Snapshot]]:
    """Return what a row is to be restored from, by kind.

    Raises:
        RowError: a part is of another kind, or does not follow the one before it.
        SnapshotError: a part has ended.
    """
    by_kind: dict[Kind, list[Snapshot]] = {kind: [] for kind in kinds}
    for part in parts:
        part.check_open()
        if part.kind not in by_kind:
            raise RowError(f"the model has no layers for {part}")
        same = by_kind[part.kind]
        if same and not (part.kind.sliceable and same[-1].stop == part.start):
            raise RowError(f"{part} does not follow {same[-1]}")
        same.append(part)
    return by_kind


def put_part(
    layers: Sequence[LayerCache],
    target: Place,
    part: Snapshot,
    start: int,
    stop: int,
    *,
    source: Place | None,
    lifted_nbytes: int,
) -> None:
    """Write what a part holds of [start, stop) into a row's place: of all layers of its kind.

    source: where the row stands that a lazy part names; of what is copied from there no more than
    `lifted_nbytes`, or one layer's, is out at once. None: the part owns its arrays, and their
    writes are lazy.
    """
    if source is None:
        for layer, state in zip(layers, part.layers, strict=True):
            whole = stop == part.stop
            layer.write(target, start, stop, state if whole else clip(state, 0, stop - start))
        return
    for some in in_parts(
        layers, lambda layer: layer.slot_nbytes(stop - start), nbytes_max=lifted_nbytes
    ):
        states = [layer.read(source, start, stop) for layer in some]
        # Now, not in the writes: they may go into the arenas that this was read from.
        wait(states)
        for layer, state in zip(some, states, strict=True):
            layer.write(target, start, stop, state)
        evaluate(some)


def write_states(
    layers: Sequence[LayerCache], target: Place, start: int, states: Mapping[int, LayerState]
) -> None:
    """Write what some layers, by number, hold from position `start` on into a row's place."""
    for number, state in states.items():
        stop = start + state[0].shape[POSITION_AXIS]
        layers[number].write(target, start, stop, state)
    evaluate([layers[number] for number in states])


def put_states_behind(
    layers: Sequence[KVCache], target: Place, start: int, states: Mapping[int, LayerState]
) -> None:
    """Dispatch copies of what `write_states` would write."""
    dispatched: list[mx.array] = []
    for number, state in states.items():
        stop = start + state[0].shape[POSITION_AXIS]
        dispatched += layers[number].put(target, start, stop, state)
    mx.async_eval(dispatched)  # type: ignore[no-untyped-call]


def put_behind(
    layers: Sequence[KVCache],
    target: Place,
    parts: Sequence[Snapshot],
    place: Callable[[RowId], Place],
    *,
    most: int,
) -> None:
    """Dispatch copies of adjacent parts, up to position `most`, into a row's place.

    place: where a row is of which a part is lazy; it is copied from there at once.
    """
    dispatched: list[mx.array] = []
    for part in parts:
        start, stop = part.start, min(part.stop, most)
        if stop <= start:
            continue
        if part.row is not None:
            held = place(part.row)
            for layer in layers:
                dispatched += layer.put(target, start, stop, held)
            continue
        # No views: each would be an operation of its own.
        sources = [(stack, at) for stack in part.stacks for at in range(len(stack[0]))]
        for layer, (stack, at) in zip(layers, sources, strict=True):
            dispatched += layer.put(target, start, stop, stack, at=at)
    if dispatched:
        mx.async_eval(dispatched)  # type: ignore[no-untyped-call]
