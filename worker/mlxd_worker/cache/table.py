"""The row table: which row sits in which slot of which arena. Pure: no arrays, no clock.

Invariants:
- Every row has one place, in an arena of its class or, where there was no other room, of a larger
  one; it leaves it for a larger class, for the arena into which its class moves, or for good.
- At most `ARENAS_MAX` arenas exist, of at most `kv_tokens_bound` tokens and `slots_bound` slots
  together; an arena's slots are fixed when it opens, and it closes with its last row.
- At most one class at a time moves into another arena (`_filling`), one row a `tend`; for each row
  still to move there is a free slot in it that nobody else may take.
- A join moves nobody. A row that must cross a class moves alone; only where there is no room at all
  are others moved at once (`finished_moves` counts them): first those of the class that is moving
  anyway, then, if that does not help, all rows into one arena of the largest class.
- Each method returns the changes that every layer must make, in order, and has noted them already.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxd_shared.arena_sizes import (
    ARENAS_MAX,
    CLASSES_MAX,
    ROWS_FEW,
    block_slots,
    capacity_classes,
    kv_tokens_bound,
    slot_sizes,
    slots_bound,
)
from mlxd_worker.cache.base import ArenaId, Change, Clear, Close, Move, Open, Place, RowError, RowId

SPARSE = 4
"""A class with so many slots a row moves into a smaller arena."""


@dataclass(slots=True)
class _Arena:
    """Who sits in which slot, and how many slots anybody ever had: always the first ones."""

    id: ArenaId
    capacity: int
    rows: list[RowId | None]
    touched: int = 0

    @property
    def slots(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return self.capacity * len(self.rows)

    @property
    def free(self) -> int:
        return self.rows.count(None)

    @property
    def used(self) -> int:
        return len(self.rows) - self.free


@dataclass(frozen=True, slots=True)
class _Room:
    """Where a row can go: an arena that exists, or one to open."""

    arena: ArenaId | None
    capacity: int
    slots: int = 0
    fills: bool = False
    """Whether the other arenas of its class are to move into the new one."""


class RowTable:
    """Places rows into arenas. One owner: the engine thread."""

    def __init__(self, *, context_max: int, rows_max: int) -> None:
        """Return a table without rows; `rows_max` bounds the rows alive, `context_max` each."""
        self.classes = capacity_classes(context_max, rows_max)
        self.context_max = context_max
        self.rows_max = rows_max
        self.version = 0
        """Changes whenever any row's place does."""
        self.finished_moves = 0
        """Rows that were moved at once because another one had to cross and found no room."""
        self._sizes = slot_sizes(rows_max)
        self._tokens_max = kv_tokens_bound(context_max, rows_max)
        self._slots_max = slots_bound(rows_max)
        self._settled_max = ARENAS_MAX if rows_max <= ROWS_FEW else CLASSES_MAX
        self._places: dict[RowId, Place] = {}
        self._arenas: dict[ArenaId, _Arena] = {}
        self._filling: ArenaId | None = None
        self._next_arena = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: RowId) -> bool:
        return row in self._places

    @property
    def rows(self) -> tuple[RowId, ...]:
        """All rows by arena, then slot: the order in which a batch needs no gathering."""
        return tuple(
            row for arena in self._sorted() for row in arena.rows if row is not None
        )  # fmt: skip

    @property
    def arenas(self) -> tuple[Open, ...]:
        """The arenas that exist, by capacity, then age, as they were opened."""
        return tuple(Open(a.id, capacity=a.capacity, slots=a.slots) for a in self._sorted())

    @property
    def tokens(self) -> int:
        """Tokens that the arenas are made for, free slots included."""
        return sum(arena.tokens for arena in self._arenas.values())

    @property
    def moving(self) -> bool:
        """Whether a class is moving into another arena."""
        return self._filling is not None

    def rows_of(self, arena: ArenaId) -> Sequence[RowId | None]:
        """Return the rows of one arena by slot; None where a slot is free."""
        return tuple(self._arenas[arena].rows)

    def place(self, row: RowId) -> Place:
        """Return where `row` sits now.

        Raises:
            RowError: unknown row.
        """
        try:
            return self._places[row]
        except KeyError:
            raise RowError(f"row {row} is not in the table") from None

    def capacity(self, row: RowId) -> int:
        """Return how many tokens fit where `row` sits now.

        Raises:
            RowError: unknown row.
        """
        return self.place(row).capacity

    def class_of(self, tokens: int) -> int:
        """Return the smallest capacity that holds `tokens`.

        Raises:
            RowError: `tokens` is not in 1..context_max.
        """
        if not 1 <= tokens <= self.context_max:
            raise RowError(f"{tokens} tokens asked for, 1 to {self.context_max} possible")
        return next(capacity for capacity in self.classes if capacity >= tokens)

    def opened_by_join(self, tokens: int) -> Open | None:
        """Return the arena that a join of `tokens` tokens would open now, if any; its id is new.

        Raises:
            RowError: `tokens` is out of range.
        """
        room = self._find(self.class_of(tokens))
        if room is None or room.arena is not None:
            return None
        return Open(ArenaId(self._next_arena), capacity=room.capacity, slots=room.slots)

    def join(self, row: RowId, *, tokens: int) -> list[Change] | None:
        """Give a new row a place for `tokens` tokens, moving nobody; None: there is none now.

        Where memory allows, there is one after at most `rows_max` calls of `tend` (but for rows
        that cross meanwhile, which come first).

        Raises:
            RowError: the row is in the table, the table is full, or `tokens` is out of range.
        """
        if row in self._places:
            raise RowError(f"row {row} joined twice")
        if len(self._places) >= self.rows_max:
            raise RowError(f"the table holds {self.rows_max} rows already")
        room = self._find(self.class_of(tokens))
        if room is None:
            return None
        changes: list[Change] = []
        self._enter(row, room, changes)
        return changes

    def reserve(self, wanted: Mapping[RowId, int]) -> list[Change]:
        """Make sure that each row can hold its tokens; crossing a class copies a row once.

        Rows that cross into one class together find an arena large enough for them all.

        Raises:
            RowError: unknown row, or tokens out of range; then nothing has changed.
        """
        targets = {row: self.class_of(tokens) for row, tokens in wanted.items()}
        crossing = [row for row, target in targets.items() if target > self.capacity(row)]
        coming = Counter(targets[row] for row in crossing)
        changes: list[Change] = []
        for row in crossing:
            target = targets[row]
            if self.capacity(row) < target:
                self._cross(row, target, coming[target], changes)
            coming[target] -= 1
        return changes

    def leave(self, row: RowId) -> list[Change]:
        """Free a row's slot at once; nobody else moves.

        Raises:
            RowError: unknown row.
        """
        place = self.place(row)
        del self._places[row]
        changes: list[Change] = []
        self._vacate(place, changes)
        return changes

    def tend(self) -> list[Change]:
        """Move at most one row towards one arena a class, of a fitting size."""
        changes: list[Change] = []
        if self._filling is None:
            self._start_filling(changes)
        if self._filling is not None:
            self._move_one(self._arenas[self._filling], changes)
        return changes

    def _sorted(self) -> list[_Arena]:
        return sorted(self._arenas.values(), key=lambda arena: (arena.capacity, arena.id))

    def _class(self, capacity: int) -> list[_Arena]:
        return [arena for arena in self._arenas.values() if arena.capacity == capacity]

    def _emptied(self) -> list[_Arena]:
        """The arenas whose rows move into `_filling`."""
        if self._filling is None:
            return []
        target = self._arenas[self._filling]
        return [arena for arena in self._class(target.capacity) if arena is not target]

    def _with_room(self, capacity: int) -> _Arena | None:
        """Return the fullest arena of a class that has a slot for a newcomer."""
        arenas = self._class(capacity)
        if self._filling is not None and self._arenas[self._filling] in arenas:
            target = self._arenas[self._filling]
            promised = sum(arena.used for arena in arenas if arena is not target)
            return target if target.free > promised else None
        return min((a for a in arenas if a.free), key=lambda arena: arena.free, default=None)

    def _find(self, capacity: int, *, coming: int = 1, left: Place | None = None) -> _Room | None:
        """Return where a row of a class can go; `left` is the place that it leaves for it."""
        own = self._with_room(capacity)
        if own is not None:
            return _Room(own.id, capacity)
        opened = self._openable(capacity, coming, left)
        if opened is not None:
            return opened
        for larger in self.classes:
            arena = self._with_room(larger) if larger > capacity else None
            if arena is not None:
                return _Room(arena.id, larger)
        return None

    def _openable(self, capacity: int, coming: int, left: Place | None) -> _Room | None:
        """Return the arena to open for a class: one for all its rows, else one beside them."""
        arenas = self._class(capacity)
        if arenas and self._filling is None:
            size = self._size_for(sum(arena.used for arena in arenas) + coming)
            if self._fits(capacity, size, self._closing(left)):
                return _Room(None, capacity, size, fills=True)
        elif arenas and left is None:
            return None  # a newcomer waits until its class can move
        return self._beside(capacity, coming, left=left, most=self._settled_max)

    def _beside(self, capacity: int, coming: int, *, left: Place | None, most: int) -> _Room | None:
        """Return an arena to open that is to stay, at most `most` of these; the largest that fits.

        Fewer than `ARENAS_MAX` leave one for a class to move into.
        """
        arenas, closing = self._class(capacity), self._closing(left)
        if any(arena.id == self._filling for arena in arenas):
            return None
        if len(self._arenas) - len(self._emptied()) - len(closing) >= most:
            return None
        wanted = sum(arena.used for arena in arenas) or self._block(capacity)
        for size in reversed(self._sizes):
            if size <= self._size_for(max(wanted, coming)) and self._fits(capacity, size, closing):
                return _Room(None, capacity, size)
        return None

    def _block(self, capacity: int) -> int:
        """Return the slots of a class's first arena: a block, but half the bound left to others."""
        held = sum(arena.slots for arena in self._arenas.values())
        spare = self._slots_max * 2 // 3 - held
        return min(block_slots(capacity, self.rows_max), max(spare, 1))

    def _closing(self, left: Place | None) -> list[_Arena]:
        """Return the arena that closes when its last row leaves this place, if it does."""
        if left is None or self._arenas[left.arena].used > 1:
            return []
        return [self._arenas[left.arena]]

    def _size_for(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= min(rows, self.rows_max))

    def _fits(self, capacity: int, slots: int, closing: Sequence[_Arena] = ()) -> bool:
        """Whether an arena more is within all bounds, once those `closing` have gone."""
        held = [arena for arena in self._arenas.values() if arena not in closing]
        return (
            len(held) < ARENAS_MAX
            and sum(arena.tokens for arena in held) + capacity * slots <= self._tokens_max
            and sum(arena.slots for arena in held) + slots <= self._slots_max
        )

    def _open(self, capacity: int, slots: int, changes: list[Change]) -> _Arena:
        arena = _Arena(ArenaId(self._next_arena), capacity, [None] * slots)
        self._next_arena += 1
        self._arenas[arena.id] = arena
        changes.append(Open(arena.id, capacity=capacity, slots=slots))
        return arena

    def _enter(self, row: RowId, room: _Room, changes: list[Change]) -> Place:
        if room.arena is None:
            arena = self._open(room.capacity, room.slots, changes)
            if room.fills:
                self._filling = arena.id
        else:
            arena = self._arenas[room.arena]
        return self._seat(row, arena, changes)

    def _seat(self, row: RowId, arena: _Arena, changes: list[Change]) -> Place:
        """Put a row into the first free slot; a slot that was used before is cleared."""
        place = Place(arena.id, arena.capacity, arena.rows.index(None))
        if place.slot < arena.touched:
            changes.append(Clear(place))
        arena.touched = max(arena.touched, place.slot + 1)
        arena.rows[place.slot] = row
        self._places[row] = place
        self.version += 1
        return place

    def _vacate(self, place: Place, changes: list[Change]) -> None:
        arena = self._arenas[place.arena]
        arena.rows[place.slot] = None
        self.version += 1
        if not arena.used:
            del self._arenas[arena.id]
            changes.append(Close(arena.id))
            if arena.id == self._filling or not self._emptied():
                self._filling = None

    def _move(self, row: RowId, arena: _Arena, changes: list[Change]) -> None:
        source = self._places[row]
        changes.append(Move(source, self._seat(row, arena, changes)))
        self._vacate(source, changes)

    def _cross(self, row: RowId, capacity: int, coming: int, changes: list[Change]) -> None:
        room = self._find(capacity, coming=coming, left=self._places[row])
        while room is None and self._make_room(capacity, coming, changes):
            room = self._find(capacity, coming=coming, left=self._places[row])
        if room is None:
            room = self._beside(capacity, coming, left=self._places[row], most=ARENAS_MAX)
        if room is None:
            self._merge(self.classes, self.classes[-1], self.rows_max, changes)
            return
        left = self._places[row]
        changes.append(Move(left, self._enter(row, room, changes)))
        self._vacate(left, changes)

    def _make_room(self, capacity: int, coming: int, changes: list[Change]) -> bool:
        """Do at once what `tend` would have done in time; return whether anything was done."""
        if self._filling is not None:
            target = self._arenas[self._filling]
            while self._filling is not None:
                self._move_one(target, changes)
                self.finished_moves += 1
            return True
        wasteful = sorted(self.classes, key=lambda c: (c != capacity, -self._waste(c)))
        for crowded in wasteful:
            arenas = self._class(crowded)
            rows = sum(arena.used for arena in arenas) + (coming if crowded == capacity else 0)
            size = self._size_for(rows)
            grows = crowded == capacity and arenas and size > sum(a.slots for a in arenas)
            spare = self._waste(crowded) + (len(arenas) > 1)
            if (grows or spare > 0) and self._fits(crowded, size, arenas):
                self._merge([crowded], crowded, size, changes)
                return True
        return False

    def _waste(self, capacity: int) -> int:
        """Return the tokens that one arena of a fitting size would save a class."""
        arenas = self._class(capacity)
        if not arenas:
            return 0
        size = self._size_for(sum(arena.used for arena in arenas))
        return sum(arena.tokens for arena in arenas) - size * capacity

    def _merge(
        self, capacities: Sequence[int], capacity: int, slots: int, changes: list[Change]
    ) -> None:
        """Move all rows of some classes into one new arena at once."""
        arenas = [a for a in self._sorted() if a.capacity in capacities]
        rows = [row for arena in arenas for row in arena.rows if row is not None]
        self._filling = None
        together = self._open(capacity, slots, changes)
        for row in rows:
            self._move(row, together, changes)
        self.finished_moves += len(rows)

    def _move_one(self, target: _Arena, changes: list[Change]) -> None:
        source = min(self._emptied(), key=lambda arena: arena.used)
        self._move(next(row for row in source.rows if row is not None), target, changes)

    def _start_filling(self, changes: list[Change]) -> None:
        """Choose a class whose rows can move together, or into an arena of a fitting size."""
        for capacity in reversed(self.classes):
            arenas = self._class(capacity)
            if not arenas:
                continue
            rows = sum(arena.used for arena in arenas)
            if len(arenas) > 1:
                own = [a for a in arenas if a.free >= rows - a.used]
                if own:
                    self._filling = min(own, key=lambda arena: arena.slots).id
                    return
                size = self._size_for(rows)
            else:
                tight = 4 * self.tokens > 3 * self._tokens_max
                size = self._size_for(
                    rows if tight else max(2 * rows, block_slots(capacity, self.rows_max))
                )
                if rows * (2 if tight else SPARSE) > arenas[0].slots or size >= arenas[0].slots:
                    continue
            lone = arenas if len(arenas) == 1 and rows == 1 else []
            if self._fits(capacity, size, lone):
                self._filling = self._open(capacity, size, changes).id
                return
