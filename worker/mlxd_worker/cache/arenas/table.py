"""The row table: which row sits in which slot of which arena. Pure: no arrays, no clock.

Invariants:
- Every row has one place, in an arena of its class or, where there was no other room, of a larger
  one; it leaves it for a larger class, for the arena into which its class moves, or for good.
- At most `ARENAS_MAX` arenas exist, of at most `kv_tokens_bound` tokens and `slots_bound` slots
  together, after each call; only while its changes are carried out may one that closes still be
  there beside the one that takes its rows.
- A class has one arena, and a full one moves into a larger one: one class at a time, one row a
  `tend`. Only where memory does not allow both has a class several that stay; where it has become
  sparse, it moves into a smaller one; or its rows sink, one a `tend`, to the slots read first.
- A join moves nobody. A row that must cross a class moves alone; only where there is no room at all
  is done at once what `tend` would have done in time (`finished_moves` counts the rows), and if
  even that does not help, all rows move into one arena of the largest class.
- Each method returns the changes that every layer must make, in order, and has noted them already.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlxd_models.sizes.arena_sizes import ARENAS_MAX, CLASSES_MAX, ROWS_FEW
from mlxd_worker.cache.arenas import settling
from mlxd_worker.cache.arenas.arenas import Arena, Arenas, rows_in
from mlxd_worker.cache.base import ArenaId, Change, Free, Open, Place, RowError, RowId

CAPACITY_AHEAD = 2
"""A row takes at most so many times the capacity that it needs at once, for what it may become."""

NEARLY_FULL = 0.75
"""A row that fills more of its capacity will soon cross, if it may become so long."""


@dataclass(slots=True)
class _Length:
    """How long a row is, as it has reserved, and may become: what is worth preparing for."""

    tokens: int
    tokens_max: int | None
    """None where nobody has said."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Where a row can go: an arena that exists, or one to open."""

    arena: Arena | None
    capacity: int
    slots: int = 0
    fills: bool = False
    """Whether the other arenas of its class are to move into the new one."""


class RowTable:
    """Places rows into arenas. One owner: the engine thread."""

    def __init__(
        self,
        *,
        context_max: int,
        rows_max: int,
        keeps_spares: bool = False,
        sinks: bool = False,
        one_class: bool = False,
        whole: bool = False,
    ) -> None:
        """Return a table without rows; `rows_max` bounds the rows alive, `context_max` each.

        keeps_spares: whether arenas without rows are kept for later rows, until `rest`. sinks:
        whether a batch reads an arena's slots up to the last one in use, not all of them: then rows
        sink within their arena, and a smaller one opens only where memory is tight. one_class:
        whether all rows have room for the whole context from the start. whole: whether one arena
        has room for all rows of that length, so that none ever moves.
        """
        self.context_max = context_max
        self.rows_max = rows_max
        self.finished_moves = 0
        """Rows that were moved at once because another one had to cross and found no room."""
        self._arenas = Arenas(
            context_max=context_max,
            rows_max=rows_max,
            keeps_spares=keeps_spares,
            one_class=one_class,
            whole=whole,
        )
        self._lengths: dict[RowId, _Length] = {}
        self._sinks = sinks
        # So few rows never have too many arenas; else one is left for a class to move into.
        self._settled_max = ARENAS_MAX if rows_max <= ROWS_FEW else CLASSES_MAX

    def __len__(self) -> int:
        return len(self._arenas.places)

    def __contains__(self, row: RowId) -> bool:
        return row in self._arenas.places

    @property
    def version(self) -> int:
        """Changes whenever any row's place does."""
        return self._arenas.version

    @property
    def classes(self) -> tuple[int, ...]:
        """The capacities in use, ascending."""
        return self._arenas.classes

    @property
    def rows(self) -> tuple[RowId, ...]:
        """All rows by arena, then slot: the order in which a batch needs no gathering."""
        return tuple([row for arena in self._arenas.in_order() for row in rows_in(arena)])

    @property
    def arenas(self) -> tuple[Open, ...]:
        """The arenas that exist, by capacity, then age, as they were opened."""
        return tuple(arena.opened for arena in self._arenas.in_order())

    @property
    def spares(self) -> tuple[Open, ...]:
        """The arenas without rows that are kept for later rows, oldest first."""
        return tuple(arena.opened for arena in self._arenas.spares)

    @property
    def tokens(self) -> int:
        """Tokens that the arenas are made for, free slots included."""
        return self._arenas.tokens

    @property
    def moving(self) -> bool:
        """Whether a class is moving into another arena."""
        return self._arenas.filling is not None

    def rows_of(self, arena: ArenaId) -> Sequence[RowId | None]:
        """Return the rows of one arena by slot; None where a slot is free."""
        return tuple(self._arenas[arena].rows)

    def place(self, row: RowId) -> Place:
        """Return where `row` sits now; a RowError says that it is unknown."""
        try:
            return self._arenas.places[row]
        except KeyError:
            raise RowError(f"row {row} is not in the table") from None

    def places(self, rows: Iterable[RowId]) -> list[Place]:
        """Return where each of `rows` sits now, in their order; raises as `place`."""
        return self._arenas.places_of(rows)

    def capacity(self, row: RowId) -> int:
        """Return how many tokens fit where `row` sits now; raises as `place`."""
        return self.place(row).capacity

    def class_of(self, tokens: int) -> int:
        """Return the smallest capacity that holds `tokens`.

        Raises:
            RowError: `tokens` is not in 1..context_max.
        """
        self._check_length(tokens)
        return next(capacity for capacity in self.classes if capacity >= tokens)

    def class_for(self, tokens: int, tokens_max: int | None) -> int:
        """Return the capacity that a row joins; it may become `tokens_max` long, None: unknown.

        Where free positions cost nothing to read it is the next class where the row will soon need
        that: it need not move then.

        Raises:
            RowError: `tokens` is not in 1..context_max.
        """
        first = self.class_of(tokens)
        if not self._sinks or tokens_max is None or not first < tokens_max <= self.context_max:
            return first
        last = self.class_of(tokens_max)
        return last if last <= CAPACITY_AHEAD * first else first

    def opened_by_join(
        self, tokens: int, *, tokens_max: int | None = None, coming: int = 1
    ) -> tuple[Open | None, tuple[Open, ...]]:
        """Return what such a `join` would open now, if anything, and close for it.

        Nothing is opened where a spare serves.

        Raises:
            RowError: `tokens` is out of range.
        """
        room = self._find_first(tokens, tokens_max, coming=coming)
        if room is None or room.arena is not None:
            return None, ()
        shape = (room.capacity, room.slots)
        if self._arenas.spare_for(*shape) is not None:
            return None, ()
        closed = tuple(spare.opened for spare in self._arenas.spares_to_close(*shape))
        return Open(self._arenas.next_id, capacity=room.capacity, slots=room.slots), closed

    def join(
        self, row: RowId, *, tokens: int, tokens_max: int | None = None, coming: int = 1
    ) -> list[Change] | None:
        """Give a new row a place for `tokens` tokens, moving nobody; None: there is none now.

        tokens_max: what the row may become, None where nobody knows. coming: rows of this class
        that are about to join, this one included. Both only save arenas that would soon be too
        small.

        There is one after at most `rows_max` calls of `tend`, if no row crosses meanwhile, fewer
        than `ARENAS_MAX` arenas are there to stay, and the bounds allow one more for all rows of
        its class and this one; and in any case once rows have left.

        Raises:
            RowError: the row is in the table, the table is full, or `tokens` is out of range.
        """
        if row in self:
            raise RowError(f"row {row} joined twice")
        if len(self) >= self.rows_max:
            raise RowError(f"the table holds {self.rows_max} rows already")
        room = self._find_first(tokens, tokens_max, coming=coming)
        if room is None:
            return None
        changes: list[Change] = []
        self._arenas.seat(row, self._enter(room, changes), changes)
        self._lengths[row] = _Length(tokens, tokens_max)
        return changes

    def rehearse(self, row: RowId, *, capacity: int, slots: int) -> list[Change]:
        """Give a row, the only one, an arena of just this shape.

        Raises:
            RowError: other rows are there, or rows never see such an arena.
        """
        if len(self) or capacity not in self.classes or slots not in self._arenas.sizes:
            raise RowError(f"{slots} slots of {capacity} tokens beside {len(self)} rows")
        changes: list[Change] = []
        self._arenas.seat(row, self._arenas.open(capacity, slots, changes), changes)
        self._lengths[row] = _Length(1, None)
        return changes

    def reserve(self, wanted: Mapping[RowId, int]) -> list[Change]:
        """Make sure that each row can hold its tokens; crossing a class copies a row once.

        An arena that opens for a row that crosses has a slot for each that will follow soon.

        Raises:
            RowError: unknown row, or tokens out of range; then nothing has changed.
        """
        for tokens in (min(wanted.values(), default=1), max(wanted.values(), default=1)):
            self._check_length(tokens)
        places = zip(wanted.items(), self.places(wanted), strict=True)
        crossing = [row for (row, tokens), place in places if tokens > place.capacity]
        targets = {row: self.class_of(wanted[row]) for row in crossing}
        for row, tokens in wanted.items():
            self._lengths[row].tokens = tokens
        coming = Counter(targets[row] for row in crossing)
        changes: list[Change] = []
        for row in crossing:
            target = targets[row]
            if self.capacity(row) < target:
                self._cross(row, target, max(coming[target], self._nearing(target)), changes)
            coming[target] -= 1
        return changes

    def leave(self, row: RowId) -> list[Change]:
        """Free a row's slot at once; nobody else moves.

        Raises:
            RowError: unknown row.
        """
        place = self.place(row)
        del self._arenas.places[row]
        del self._lengths[row]
        changes: list[Change] = [Free(place)]
        self._arenas.vacate(place, changes)
        return changes

    def tend(self) -> list[Change]:
        """Move at most one row towards one arena a class, of a fitting size, or to a lower slot."""
        changes: list[Change] = []
        if self._arenas.filling is None:
            settling.start_filling(self._arenas, changes, sinks=self._sinks)
        if not settling.move_one(self._arenas, changes) and self._sinks:
            settling.sink_one(self._arenas, changes)
        return changes

    def rest(self) -> list[Change]:
        """Close all spares."""
        changes: list[Change] = []
        self._arenas.close_spares(self._arenas.spares, changes)
        return changes

    def _check_length(self, tokens: int) -> None:
        if not 1 <= tokens <= self.context_max:
            raise RowError(f"{tokens} tokens asked for, 1 to {self.context_max} possible")

    def _find_first(self, tokens: int, tokens_max: int | None, *, coming: int) -> _Room | None:
        """Return where a newcomer can go: best where it can stay."""
        least, wanted = self.class_of(tokens), self.class_for(tokens, tokens_max)
        room = self._find(wanted, coming=coming)
        return self._find(least, coming=coming) if room is None and least < wanted else room

    def _find(self, capacity: int, *, coming: int = 1, left: Place | None = None) -> _Room | None:
        """Return where a row of a class can go: its own class, a new arena, a larger class.

        coming: rows that are about to enter the class. left: the place that the row leaves for it.
        """
        own = self._arenas.with_room(capacity)
        if own is not None:
            return _Room(own, capacity)
        opened = self._openable(capacity, coming, left)
        if opened is not None:
            return opened
        for larger in self.classes:
            arena = self._arenas.with_room(larger) if larger > capacity else None
            if arena is not None:
                return _Room(arena, larger)
        return None

    def _openable(self, capacity: int, coming: int, left: Place | None) -> _Room | None:
        """Return the arena to open for a class: one for all its rows, else one beside them."""
        rows, arenas = self._arenas.rows_of(capacity), self._arenas
        if rows and arenas.filling is None:
            size = arenas.size_for(rows + coming)
            if arenas.fits(capacity, size, arenas.closing(left)):
                return _Room(None, capacity, size, fills=True)
        elif rows and left is None:
            return None  # a newcomer waits until its class can move
        return self._beside(capacity, coming, left, most=self._settled_max)

    def _beside(self, capacity: int, coming: int, left: Place | None, *, most: int) -> _Room | None:
        """Return an arena to open that is to stay, at most `most` of these; the largest that fits.

        Fewer than `ARENAS_MAX` leave one for a class to move into.
        """
        arenas, closing = self._arenas, self._arenas.closing(left)
        if arenas.filling in arenas.of(capacity):
            return None
        if len(arenas) - len(arenas.emptied) - len(closing) >= most:
            return None
        wanted = max(arenas.rows_of(capacity) or arenas.block(capacity), coming)
        for size in reversed(arenas.sizes):
            if size <= arenas.size_for(wanted) and arenas.fits(capacity, size, closing):
                return _Room(None, capacity, size)
        return None

    def _enter(self, room: _Room, changes: list[Change]) -> Arena:
        if room.arena is not None:
            return room.arena
        arena = self._arenas.open(room.capacity, room.slots, changes)
        if room.fills:
            self._arenas.filling = arena
        return arena

    def _cross(self, row: RowId, capacity: int, coming: int, changes: list[Change]) -> None:
        room = self._find(capacity, coming=coming, left=self.place(row))
        while room is None and self._make_room(capacity, coming, changes):
            room = self._find(capacity, coming=coming, left=self.place(row))
        if room is None:
            room = self._beside(capacity, coming, self.place(row), most=ARENAS_MAX)
        if room is None:
            self._merge(self.classes, self.classes[-1], self.rows_max, changes)
        else:
            self._arenas.move(row, self._enter(room, changes), changes)

    def _nearing(self, capacity: int) -> int:
        """Return how many rows will soon enter a class, those that cross now included."""
        below = [smaller for smaller in self.classes if smaller < capacity][-1]
        return sum(
            length.tokens > below * NEARLY_FULL and (length.tokens_max or 0) > below
            for row, length in self._lengths.items()
            if self.capacity(row) == below
        )

    def _make_room(self, capacity: int, coming: int, changes: list[Change]) -> bool:
        """Do at once what `tend` would have done in time; return whether anything was done."""
        arenas = self._arenas
        if arenas.filling is not None:
            while settling.move_one(self._arenas, changes):
                self.finished_moves += 1
            return True
        for crowded in sorted(self.classes, key=lambda c: (c != capacity, -arenas.waste(c))):
            own = arenas.of(crowded)
            rows = arenas.rows_of(crowded) + (coming if crowded == capacity else 0)
            size = arenas.size_for(rows)
            grows = crowded == capacity and size > sum(arena.slots for arena in own) > 0
            saves = arenas.waste(crowded) > 0 or (arenas.waste(crowded) == 0 and len(own) > 1)
            if (grows or saves) and arenas.fits(crowded, size, own):
                self._merge([crowded], crowded, size, changes)
                return True
        return False

    def _merge(
        self, merged: Collection[int], capacity: int, slots: int, changes: list[Change]
    ) -> None:
        """Move all rows of some classes into one new arena at once."""
        arenas = self._arenas
        rows = [row for a in arenas.in_order() if a.capacity in merged for row in rows_in(a)]
        arenas.filling = None
        together = arenas.open(capacity, slots, changes)
        for row in rows:
            arenas.move(row, together, changes)
        self.finished_moves += len(rows)
