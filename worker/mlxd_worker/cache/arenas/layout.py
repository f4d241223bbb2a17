"""How a batch's rows lie in the arenas, as index arrays that serve until a row's place changes.

Invariants:
- Only places decide a layout, so one is made when rows join, leave, move, or another batch is run,
  not at every step.
- Where shapes must be few, a group is a whole arena: all its slots, to its full capacity.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Group
from mlxd_worker.cache.arenas.table import RowTable
from mlxd_worker.cache.base import ArenaId, Place, RowId

FINE_SPAN = 32
"""Where shapes cost nothing, attention spans are multiples of this."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The part of a group that depends on places alone."""

    arena: ArenaId
    capacity: int
    batch_rows: tuple[int, ...]
    members: mx.array | None
    queriers: mx.array | None
    slots_used: int
    write_slots: mx.array


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a plan that depends on places alone, and what it was made for."""

    rows: tuple[RowId, ...]
    version: int
    groups: tuple[GroupLayout, ...]
    order: mx.array | None
    places: tuple[Place, ...]


def arrange(table: RowTable, rows: tuple[RowId, ...], *, whole_arenas: bool) -> Layout:
    """Return how a batch of `rows` lies in the arenas now."""
    index_of = {row: index for index, row in enumerate(rows)}
    groups: list[GroupLayout] = []
    result_of = [0] * len(rows)
    results = 0
    for arena in table.arenas:
        residents = table.rows_of(arena.arena)
        slots = [slot for slot, row in enumerate(residents) if row in index_of]
        if not slots:
            continue
        slots_used = arena.slots if whole_arenas else slots[-1] + 1
        batch_rows = tuple(index_of[row] for row in residents if row in index_of)
        for slot, index in zip(slots, batch_rows, strict=True):
            result_of[index] = results + slot
        results += slots_used
        queriers = tuple(
            batch_rows[0] if row is None else index_of.get(row, batch_rows[0])
            for row in residents[:slots_used]
        )
        one_run = batch_rows == tuple(range(batch_rows[0], batch_rows[0] + len(batch_rows)))
        groups.append(
            GroupLayout(
                arena=arena.arena,
                capacity=arena.capacity,
                batch_rows=batch_rows,
                members=None if one_run else _index(batch_rows),
                queriers=None if queriers == batch_rows else _index(queriers),
                slots_used=slots_used,
                write_slots=_index(slots).reshape(-1, 1),
            )
        )
    return Layout(
        rows=rows,
        version=table.version,
        groups=tuple(groups),
        order=None if result_of == list(range(results)) else _index(result_of),
        places=tuple(table.place(row) for row in rows),
    )


def group_of(
    part: GroupLayout,
    offsets: mx.array,
    lengths: Sequence[int],
    *,
    width: int,
    whole_arenas: bool,
) -> Group:
    """Return the group for a pass of `width` tokens a row; `offsets` int32 [N] are before it."""
    first, count = part.batch_rows[0], len(part.batch_rows)
    steps = mx.arange(width, dtype=mx.int32)
    own = offsets[first : first + count] if part.members is None else offsets[part.members]
    first_positions = own if part.queriers is None else offsets[part.queriers]
    longest = max(lengths[index] for index in part.batch_rows)
    fine = min(-(-longest // FINE_SPAN) * FINE_SPAN, part.capacity)
    return Group(
        arena=part.arena,
        capacity=part.capacity,
        members=part.members,
        queriers=part.queriers,
        first=first,
        count=count,
        slots_used=part.slots_used,
        span=part.capacity if whole_arenas else fine,
        write_slots=part.write_slots,
        write_positions=own[:, None] + steps,
        last_visible=first_positions[:, None] + steps,
    )


def _index(values: Sequence[int]) -> mx.array:
    return mx.array(list(values), dtype=mx.int32)
