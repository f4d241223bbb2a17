"""Rows read by kernels, to be kept, and put back by others that write in place.

Invariants:
- Nobody waits: passes that are dispatched later find it there, as each runs after those before it.
- What is put is dispatched by itself: among the kernels of one dispatch MLX knows of no order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxd_worker.cache.base import LayerCache, Place, RowId
from mlxd_worker.cache.changes import in_parts
from mlxd_worker.cache.kept.snapshot import LayerState, Snapshot
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.kernels.row_copies import are_alike, copy_ranges


def putting_layers(layers: Sequence[LayerCache | None]) -> tuple[KVCache, ...]:
    """Return all layers where each of them can put by a kernel; none where one cannot."""
    able = tuple(layer for layer in layers if isinstance(layer, KVCache) and layer.puts)
    return able if len(able) == len(layers) else ()


def read_layers(
    layers: Sequence[LayerCache], place: Place, start: int, stop: int
) -> tuple[LayerState, ...]:
    """Return what each layer's `read` does, by one kernel for many where all have that; lazy.

    A row that ends costs a GPU's host few calls then, not one a layer. Layers of more than
    `LIFTED_NBYTES` go apart, so that who joins them with others has no copy of all beside these.
    """
    able = [layer for layer in layers if isinstance(layer, KVCache) and layer.copies]
    count = stop - start
    ranges = [layer.range_at(place, start) for layer in able]
    if len(able) < len(layers) or not are_alike(ranges):
        return tuple(layer.read(place, start, stop) for layer in layers)
    copies: list[LayerState] = []
    pairs = list(zip(able, ranges, strict=True))
    for some in in_parts(pairs, lambda pair: pair[0].slot_nbytes(count)):
        copies += copy_ranges([each for _, each in some], count)
    return tuple(copies)


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
        held = None if part.row is None else place(part.row)
        for index, layer in enumerate(layers):
            source = part.layers[index] if held is None else held
            dispatched += layer.put(target, start, stop, source)
    if dispatched:
        mx.async_eval(dispatched)  # type: ignore[no-untyped-call]
