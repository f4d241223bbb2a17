"""How a table's rows settle: a class into one arena, of a fitting size, one row at a time. Pure.

Invariants:
- One class fills an arena at a time; a call moves one row, so that nobody waits for many.
- Where rows sink, the slots above the last row of an arena cost nothing to read: its rows go down
  into the first ones, and a smaller arena, which would be new memory, opens only where memory is
  tight.
"""

from collections.abc import Sequence

from mlxd_worker.cache.arenas.arenas import Arena, Arenas, rows_in
from mlxd_worker.cache.base import Change

SPARSE = 4
"""A class with so many slots a row moves into a smaller arena."""

TIGHT_SPARSE = 2
"""The same where memory is tight."""

SUNK = 2
"""Where rows sink, fewer slots than so many a row are read."""

TIGHT_FRACTION = 0.75
"""Memory is tight where arenas hold more of the bound."""


def move_one(arenas: Arenas, changes: list[Change]) -> bool:
    """Move a row into the arena that is filling; return whether there was one to move."""
    target = arenas.filling
    if target is None:
        return False
    source = min(arenas.emptied, key=lambda arena: arena.used)
    arenas.move(rows_in(source)[0], target, changes)
    return True


def sink_one(arenas: Arenas, changes: list[Change]) -> None:
    """Move the last row of an arena, where too much is read below it, into its first free slot."""
    for arena in arenas.in_order():
        last = max(slot for slot, row in enumerate(arena.rows) if row is not None)
        row = arena.rows[last]
        if row is not None and arena.used <= last and last + 1 >= SUNK * arena.used:
            arenas.move(row, arena, changes)
            return


def start_filling(arenas: Arenas, changes: list[Change], *, sinks: bool) -> None:
    """Choose a class whose rows can move together, or into an arena of a fitting size."""
    for capacity in reversed(arenas.classes):
        own, rows = arenas.of(capacity), arenas.rows_of(capacity)
        roomy = [arena for arena in own if arena.free >= rows - arena.used]
        if len(own) > 1 and roomy:
            arenas.filling = min(roomy, key=lambda arena: arena.slots)
            return
        size = arenas.size_for(rows) if len(own) > 1 else _smaller(arenas, own, sinks=sinks)
        closing = [arena for arena in own if arena.used == 1][:1]
        if size and arenas.fits(capacity, size, closing):
            arenas.filling = arenas.open(capacity, size, changes)
            return


def _smaller(arenas: Arenas, own: Sequence[Arena], *, sinks: bool) -> int:
    """Return how many slots would do for a class's only arena, where it is sparse; else 0."""
    if not own:
        return 0
    (arena,) = own
    tight = arenas.tokens > TIGHT_FRACTION * arenas.tokens_max
    if sinks and not tight:
        return 0
    if arena.used * (TIGHT_SPARSE if tight else SPARSE) > arena.slots:
        return 0
    wanted = arena.used if tight else max(2 * arena.used, arenas.block(arena.capacity))
    size = arenas.size_for(wanted)
    return size if size < arena.slots else 0
