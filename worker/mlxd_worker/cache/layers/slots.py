"""One token for each row, laid out by slots: the shapes follow from the arenas alone.

Invariants:
- The flat rows of such a pass are all slots of the arenas in it, arena by arena; a row that is
  alone, in an arena of several slots, is one flat row.
- A slot whose row is not in the pass, or that is free, takes part and is dropped. What it writes is
  never read: position 0 of a free slot, the next position of a row that waits; that row's next
  token, or the slot's next row, overwrites it first.
- Only layers whose positions stand for themselves can be run like this: in a ring or a recurrent
  state such a write would be seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Group, StepPlan
from mlxd_worker.cache.arenas.table import RowTable
from mlxd_worker.cache.base import ArenaId, LayerCache, RowId
from mlxd_worker.cache.layers.store import SliceableCache

TARGETS_MIN = 8
"""The least length of the array that tells a kernel where rows write."""


def slot_caches(layers: Sequence[LayerCache | None]) -> tuple[SliceableCache, ...] | None:
    """Return the layers as what a pass by slots needs; None where one of them cannot be that."""
    sliceable = tuple(layer for layer in layers if isinstance(layer, SliceableCache))
    return sliceable if sliceable and len(sliceable) == len(layers) else None


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """An arena, but for who sits in it."""

    capacity: int
    slots: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How a batch of rows lies by slots; it serves until a row's place changes."""

    rows: tuple[RowId, ...]
    version: int
    arenas: tuple[ArenaId, ...]
    shapes: tuple[ArenaShape, ...]
    alone: int | None
    """The slot of a row that is alone in its arena and takes one flat row; None: all slots do."""
    flat_of: tuple[int, ...]
    """The flat row of each batch row."""
    flat_rows: int
    waiting: tuple[tuple[int, RowId], ...]
    """The flat rows of rows that are not in the batch."""
    source: mx.array | None
    """int32 [flat_rows]: whose token each flat row takes; None if that is the batch's order."""
    order: mx.array | None
    """int32 [N]: `flat_of`; None where that is the flat rows as they are."""
    slot: mx.array
    """int32 [1]: `alone`, or 0."""


def lay_by_slots(table: RowTable, rows: tuple[RowId, ...], *, lone_row: bool) -> SlotLayout:
    """Return how `rows` lie by slots now; `lone_row`: a single one takes one flat row."""
    index_of = {row: index for index, row in enumerate(rows)}
    flat_of = [0] * len(rows)
    source: list[int] = []
    waiting: list[tuple[int, RowId]] = []
    arenas = [a for a in table.arenas if any(row in index_of for row in table.rows_of(a.arena))]
    alone = None
    if lone_row and len(rows) == 1 and arenas[0].slots > 1:
        alone = table.place(rows[0]).slot
        source = [0]
    else:
        for arena in arenas:
            for row in table.rows_of(arena.arena):
                if row is not None and row in index_of:
                    flat_of[index_of[row]] = len(source)
                elif row is not None:
                    waiting.append((len(source), row))
                source.append(0 if row is None else index_of.get(row, 0))
    as_it_is = source == list(range(len(rows)))
    return SlotLayout(
        rows=rows,
        version=table.version,
        arenas=tuple(arena.arena for arena in arenas),
        shapes=tuple(ArenaShape(arena.capacity, arena.slots) for arena in arenas),
        alone=alone,
        flat_of=tuple(flat_of),
        flat_rows=len(source),
        waiting=tuple(waiting),
        source=None if as_it_is else mx.array(source, dtype=mx.int32),
        order=None if as_it_is else mx.array(flat_of, dtype=mx.int32),
        slot=mx.array([alone or 0], dtype=mx.int32),
    )


def positions_of(
    layout: SlotLayout, lengths: Sequence[int], waiting: Mapping[RowId, int]
) -> mx.array:
    """Return where each flat row writes, int32 [flat_rows].

    lengths: the batch's rows after the pass. waiting: the offsets of the rows not in it.
    """
    positions = [0] * layout.flat_rows
    for flat, length in zip(layout.flat_of, lengths, strict=True):
        positions[flat] = length - 1
    for flat, row in layout.waiting:
        positions[flat] = waiting[row]
    return mx.array(positions, dtype=mx.int32)


def on_device(slots: mx.array, positions: mx.array, turned: mx.array | None = None) -> mx.array:
    """Return both as one array `[TARGETS_MIN or more, 2]` that has been computed.

    turned: where tokens stand for rotations, a third column; None: at their positions.

    MLX keeps what comes from the host, and all arrays of 8 bytes, where a GPU reads them over its
    bus: 8 us a kernel on an H200, of each layer.
    """
    padding = max(TARGETS_MIN - positions.shape[0], 0)
    columns = [slots, positions] if turned is None else [slots, positions, turned]
    return mx.pad(mx.stack(columns, axis=1), [(0, padding), (0, 0)])


def plan_by_slots(
    shapes: Sequence[ArenaShape],
    arenas: Sequence[ArenaId],
    *,
    positions: mx.array,
    slot: mx.array,
    lone_row: bool,
    dtype: mx.Dtype,
    turned: mx.array | None = None,
) -> StepPlan:
    """Return the plan of a pass by slots, from arrays that may be a function's arguments.

    turned: where tokens stand for rotations, as `positions`; None: there.
    """
    groups: list[Group] = []
    first = 0
    for shape, arena in zip(shapes, arenas, strict=True):
        count = 1 if lone_row else shape.slots
        part = slice(None) if len(shapes) == 1 else slice(first, first + count)
        own = positions if len(shapes) == 1 else positions[part]
        at = own[:, None]
        slots = slot if lone_row else mx.arange(count, dtype=mx.int32)
        groups.append(
            Group(
                arena=arena,
                capacity=shape.capacity,
                queriers=mx.zeros(shape.slots, dtype=mx.int32) if lone_row else None,
                first=first,
                count=count,
                slots_used=shape.slots,
                span=shape.capacity,
                write_slots=slots[:, None],
                write_positions=at,
                last_visible=mx.broadcast_to(at, (shape.slots, 1)) if lone_row else at,
                targets=on_device(slots, own, None if turned is None else turned[part]),
            )
        )
        first += count
    return StepPlan(
        width=1,
        dtype=dtype,
        groups=tuple(groups),
        order=slot if lone_row else None,
        bounded_shapes=True,
        in_place=True,
    )
