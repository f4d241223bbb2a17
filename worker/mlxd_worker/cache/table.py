"""The row table: which row sits in which slot of which arena. Pure: no arrays, no clock.

Invariants:
- Every row has one place; the rows of an arena fill its first slots without a hole.
- An arena has 2^k slots (at most `rows_max`), at least one row, and is released with its last row.
  It doubles when full and halves at a quarter: over time less than one row copied a join or leave.
- A capacity class is the smallest that holds what was reserved; a row only moves to larger ones.
- At most `CLASSES_MAX` classes, since each costs an attention call a layer.
- Each method returns the changes that every layer must make, in order, and has noted them already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxd_worker.cache.base import Change, Clear, Move, Place, Resize, RowError, RowId

CLASSES_MAX = 6
"""Capacity classes, hence attention calls a layer, hence shapes to warm."""

CAPACITY_MIN = 256
"""Tokens of the smallest class; attention kernels like multiples of 256."""


def capacity_classes(context_max: int) -> tuple[int, ...]:
    """Return the capacities in use for a context, ascending; the last is the context rounded up.

    The ratio is 2, or the smallest power of two that keeps to `CLASSES_MAX` classes.
    """
    top = -(-context_max // CAPACITY_MIN) * CAPACITY_MIN
    ratio = 2
    while CAPACITY_MIN * ratio ** (CLASSES_MAX - 1) < top:
        ratio *= 2
    classes: list[int] = []
    capacity = CAPACITY_MIN
    while capacity < top:
        classes.append(capacity)
        capacity *= ratio
    return (*classes, top)


@dataclass(slots=True)
class _Arena:
    """One class's slots: who sits in the first ones, how many exist, how many were ever used."""

    rows: list[RowId]
    slots: int
    touched: int


class RowTable:
    """Places rows into arenas. One owner: the engine thread."""

    def __init__(self, *, context_max: int, rows_max: int) -> None:
        """Return a table without rows; `rows_max` bounds the rows alive, `context_max` each."""
        self.classes = capacity_classes(context_max)
        self.context_max = context_max
        self.rows_max = rows_max
        self.version = 0
        """Changes whenever any row's place does."""
        self._capacity: dict[RowId, int] = {}
        self._arenas: dict[int, _Arena] = {}

    def __len__(self) -> int:
        return len(self._capacity)

    def __contains__(self, row: RowId) -> bool:
        return row in self._capacity

    @property
    def rows(self) -> tuple[RowId, ...]:
        """All rows by capacity, then slot: the order in which a batch needs no gathering."""
        return tuple(row for capacity in self.arenas for row in self._arenas[capacity].rows)

    @property
    def arenas(self) -> tuple[int, ...]:
        """Capacities of the arenas that exist, ascending."""
        return tuple(sorted(self._arenas))

    def rows_of(self, capacity: int) -> Sequence[RowId]:
        """Return the rows of one arena by slot."""
        return tuple(self._arenas[capacity].rows)

    def slots_of(self, capacity: int) -> int:
        """Return the slots of one arena, free ones included; 0 where there is none."""
        arena = self._arenas.get(capacity)
        return arena.slots if arena else 0

    def capacity(self, row: RowId) -> int:
        """Return how many tokens fit where `row` sits now.

        Raises:
            RowError: unknown row.
        """
        try:
            return self._capacity[row]
        except KeyError:
            raise RowError(f"row {row} is not in the table") from None

    def place(self, row: RowId) -> Place:
        """Return where `row` sits now."""
        capacity = self.capacity(row)
        return Place(capacity, self._arenas[capacity].rows.index(row))

    def class_of(self, tokens: int) -> int:
        """Return the smallest capacity that holds `tokens`.

        Raises:
            RowError: `tokens` is not in 1..context_max.
        """
        if not 1 <= tokens <= self.context_max:
            raise RowError(f"{tokens} tokens asked for, 1 to {self.context_max} possible")
        return next(capacity for capacity in self.classes if capacity >= tokens)

    def slots_added(self, capacity: int) -> int:
        """Return how many slots one more row in this class would add (0 while one is free)."""
        arena = self._arenas.get(capacity)
        if arena is None:
            return 1
        return self._grown(arena) - arena.slots

    def join(self, row: RowId, *, tokens: int) -> list[Change]:
        """Give a new row a place for `tokens` tokens.

        Raises:
            RowError: the row is in the table, the table is full, or `tokens` is out of range.
        """
        if row in self._capacity:
            raise RowError(f"row {row} joined twice")
        if len(self._capacity) >= self.rows_max:
            raise RowError(f"the table holds {self.rows_max} rows already")
        changes: list[Change] = []
        place = self._enter(row, self.class_of(tokens), changes)
        self._clear_used(place, changes)
        return changes

    def reserve(self, row: RowId, *, tokens: int) -> list[Change]:
        """Make sure that `row` can hold `tokens` tokens; crossing a class copies that row once.

        Raises:
            RowError: unknown row, or `tokens` is out of range.
        """
        current = self.place(row)
        target_capacity = self.class_of(tokens)
        if target_capacity <= current.capacity:
            return []
        changes: list[Change] = []
        target = self._enter(row, target_capacity, changes)
        self._clear_used(target, changes)
        changes.append(Move(current, target))
        self._vacate(current, changes)
        return changes

    def leave(self, row: RowId) -> list[Change]:
        """Free a row's slot at once; the last row of its arena takes it.

        Raises:
            RowError: unknown row.
        """
        place = self.place(row)
        del self._capacity[row]
        changes: list[Change] = []
        self._vacate(place, changes)
        return changes

    def _enter(self, row: RowId, capacity: int, changes: list[Change]) -> Place:
        arena = self._arenas.setdefault(capacity, _Arena(rows=[], slots=0, touched=0))
        slots = self._grown(arena)
        if slots != arena.slots:
            changes.append(Resize(capacity, slots))
            arena.slots = slots
        arena.rows.append(row)
        self._capacity[row] = capacity
        self.version += 1
        return Place(capacity, len(arena.rows) - 1)

    def _grown(self, arena: _Arena) -> int:
        if len(arena.rows) < arena.slots:
            return arena.slots
        return max(1, min(arena.slots * 2, self.rows_max))

    def _clear_used(self, place: Place, changes: list[Change]) -> None:
        arena = self._arenas[place.capacity]
        if place.slot < arena.touched:
            changes.append(Clear(place))
        arena.touched = max(arena.touched, place.slot + 1)

    def _vacate(self, place: Place, changes: list[Change]) -> None:
        arena = self._arenas[place.capacity]
        self.version += 1
        last = arena.rows.pop()
        if place.slot < len(arena.rows):
            arena.rows[place.slot] = last
            changes.append(Move(Place(place.capacity, len(arena.rows)), place))
        if not arena.rows:
            del self._arenas[place.capacity]
            changes.append(Resize(place.capacity, 0))
        elif len(arena.rows) <= arena.slots // 4:
            arena.slots //= 2
            arena.touched = min(arena.touched, arena.slots)
            changes.append(Resize(place.capacity, arena.slots))
