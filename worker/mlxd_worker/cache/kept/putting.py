"""What is kept put back by kernels that write in place, behind whatever is under way.

Invariants:
- Nobody waits: passes that are dispatched later find it there, as each runs after those before it.
- It is dispatched by itself: among the kernels of one dispatch MLX knows of no order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxd_worker.cache.base import LayerCache, Place, RowId
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.layers.kv import KVCache


def putting_layers(layers: Sequence[LayerCache | None]) -> tuple[KVCache, ...]:
    """Return all layers where each of them can put by a kernel; none where one cannot."""
    able = tuple(layer for layer in layers if isinstance(layer, KVCache) and layer.puts)
    return able if len(able) == len(layers) else ()


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
