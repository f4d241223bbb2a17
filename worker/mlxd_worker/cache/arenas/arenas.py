"""The arenas of a row table and who sits in them: what exists, what fits, and each single change.

Invariants:
- A row has one place. A slot's next row is told to clear it (`judged` says how much of it); the
  slots ever used are the first ones.
- An arena's slots are fixed when it opens; it closes with its last row, or becomes a spare: nobody
  sees it any more, but the next arena of its shape is made of it (decision 0021).
- Arenas and spares together keep the bounds; whoever opens an arena closes the oldest spares first.
- At most one arena is `filling`: the rows of the other arenas of its class, the emptied ones, move
  into it. For each of these there is a slot in it that nobody else may take.
- Every change is noted here when it is appended to the caller's list.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mlxd_models.sizes.arena_sizes import (
    ARENAS_MAX,
    block_slots,
    capacity_classes,
    kv_tokens_bound,
    slot_sizes,
    slots_bound,
)
from mlxd_worker.cache.base import (
    ArenaId,
    Change,
    Clear,
    Close,
    Move,
    Open,
    Place,
    Reuse,
    RowError,
    RowId,
)


@dataclass(slots=True)
class Arena:
    """Who sits in which slot, and how many slots anybody ever had."""

    id: ArenaId
    capacity: int
    rows: list[RowId | None]
    touched: int = 0

    @property
    def slots(self) -> int:
        """All slots."""
        return len(self.rows)

    @property
    def opened(self) -> Open:
        """The change that has opened it."""
        return Open(self.id, capacity=self.capacity, slots=self.slots)

    @property
    def tokens(self) -> int:
        """Tokens that it is made for, free slots included."""
        return self.capacity * len(self.rows)

    @property
    def free(self) -> int:
        """Slots without a row."""
        return self.rows.count(None)

    @property
    def used(self) -> int:
        """Slots with a row."""
        return len(self.rows) - self.free


class Arenas:
    """All arenas of a table and the places in them. One owner: the row table."""

    def __init__(
        self,
        *,
        context_max: int,
        rows_max: int,
        keeps_spares: bool = False,
        one_class: bool = False,
        whole: bool = False,
    ) -> None:
        """Return no arenas, within the bounds for so many tokens a row and so many rows.

        one_class: all are of the largest class; there are then no more slots than rows. whole: the
        first one has room for all rows at full length, so that there is never another one.
        """
        self._keeps_spares = keeps_spares
        self.classes = capacity_classes(context_max, rows_max)[-1 if one_class or whole else 0 :]
        self.sizes = slot_sizes(rows_max)[-1 if whole else 0 :]
        self.tokens_max = kv_tokens_bound(context_max, rows_max)
        self.slots_max = slots_bound(rows_max)
        self.places: dict[RowId, Place] = {}
        self.filling: Arena | None = None
        self.version = 0
        """Changes whenever any row's place does."""
        self.next_id = ArenaId(0)
        self._arenas: dict[ArenaId, Arena] = {}
        self._spares: dict[ArenaId, Arena] = {}

    def __len__(self) -> int:
        return len(self._arenas)

    def __getitem__(self, arena: ArenaId) -> Arena:
        return self._arenas[arena]

    @property
    def tokens(self) -> int:
        """Tokens that all are made for."""
        return sum(arena.tokens for arena in self._arenas.values())

    @property
    def slots(self) -> int:
        """Slots of all."""
        return sum(arena.slots for arena in self._arenas.values())

    @property
    def spares(self) -> list[Arena]:
        """The arenas without rows that are kept, oldest first."""
        return list(self._spares.values())

    @property
    def emptied(self) -> list[Arena]:
        """The arenas whose rows move into the one that is filling."""
        if self.filling is None:
            return []
        return [arena for arena in self.of(self.filling.capacity) if arena is not self.filling]

    def in_order(self) -> list[Arena]:
        """Return all by capacity, then age."""
        return sorted(self._arenas.values(), key=lambda arena: (arena.capacity, arena.id))

    def places_of(self, rows: Iterable[RowId]) -> list[Place]:
        """Return where each of `rows` sits, in their order.

        Raises:
            RowError: an unknown row.
        """
        try:
            return [self.places[row] for row in rows]
        except KeyError as error:
            raise RowError(f"row {error.args[0]} is not in the table") from None

    def of(self, capacity: int) -> list[Arena]:
        """Return the arenas of one class."""
        return [arena for arena in self._arenas.values() if arena.capacity == capacity]

    def rows_of(self, capacity: int) -> int:
        """Return how many rows sit in the arenas of one class."""
        return sum(arena.used for arena in self.of(capacity))

    def size_for(self, rows: int) -> int:
        """Return the least number of slots, of those an arena may have, for so many rows."""
        return next(size for size in self.sizes if size >= min(rows, self.sizes[-1]))

    def block(self, capacity: int) -> int:
        """Return the slots of a class's first arena: a block, where the other classes leave it."""
        spare = self.slots_max * 2 // 3 - self.slots
        return min(block_slots(capacity, self.sizes[-1]), max(spare, 1))

    def waste(self, capacity: int) -> int:
        """Return the tokens that one arena of a fitting size would save a class."""
        held = sum(arena.tokens for arena in self.of(capacity))
        return held - capacity * self.size_for(self.rows_of(capacity)) if held else 0

    def fits(self, capacity: int, slots: int, closing: Collection[Arena] = ()) -> bool:
        """Tell whether an arena more is within all bounds once those `closing` have gone."""
        return (
            len(self) - len(closing) < ARENAS_MAX
            and self.tokens - sum(a.tokens for a in closing) + capacity * slots <= self.tokens_max
            and self.slots - sum(a.slots for a in closing) + slots <= self.slots_max
        )

    def with_room(self, capacity: int) -> Arena | None:
        """Return the fullest arena of a class that has a slot for a newcomer."""
        arenas = self.of(capacity)
        if self.filling in arenas:
            promised = sum(arena.used for arena in self.emptied)
            return self.filling if self.filling and self.filling.free > promised else None
        return min((a for a in arenas if a.free), key=lambda arena: arena.free, default=None)

    def closing(self, left: Place | None) -> list[Arena]:
        """Return the arena that closes when the row at this place has left it, if it does."""
        if left is None or self._arenas[left.arena].used > 1:
            return []
        return [self._arenas[left.arena]]

    def spare_for(self, capacity: int, slots: int) -> Arena | None:
        """Return the youngest spare of a shape."""
        shape = (capacity, slots)
        fitting = (a for a in reversed(self._spares.values()) if (a.capacity, a.slots) == shape)
        return next(fitting, None)

    def spares_to_close(self, capacity: int, slots: int) -> list[Arena]:
        """Return the spares that an arena of this shape would close, oldest first."""
        if self.spare_for(capacity, slots) is not None:
            return []
        return self._too_many(tokens=capacity * slots, slots=slots)

    def open(self, capacity: int, slots: int, changes: list[Change]) -> Arena:
        """Open an arena, of a spare where there is one of its shape."""
        arena = Arena(self.next_id, capacity, [None] * slots)
        self.next_id = ArenaId(self.next_id + 1)
        spare = self.spare_for(capacity, slots)
        if spare is None:
            self.close_spares(self.spares_to_close(capacity, slots), changes)
            changes.append(Open(arena.id, capacity=capacity, slots=slots))
        else:
            del self._spares[spare.id]
            arena.touched = spare.touched
            changes.append(Reuse(spare.id, arena.id, capacity=capacity, slots=slots))
        self._arenas[arena.id] = arena
        return arena

    def close_spares(self, spares: Sequence[Arena], changes: list[Change]) -> None:
        """Give spares back."""
        for spare in spares:
            del self._spares[spare.id]
            changes.append(Close(spare.id))

    def seat(self, row: RowId, arena: Arena, changes: list[Change]) -> Place:
        """Put a row into the first free slot of an arena that has one."""
        place = Place(arena.id, arena.capacity, arena.rows.index(None))
        if place.slot < arena.touched:
            changes.append(Clear(place))
        arena.touched = max(arena.touched, place.slot + 1)
        arena.rows[place.slot] = row
        self.places[row] = place
        self.version += 1
        return place

    def vacate(self, place: Place, changes: list[Change]) -> None:
        """Free a slot; with the last one its arena becomes a spare, if the bounds leave room."""
        arena = self._arenas[place.arena]
        arena.rows[place.slot] = None
        self.version += 1
        if not arena.used:
            self._spares[arena.id] = self._arenas.pop(arena.id)
            self.close_spares(self._too_many() if self._keeps_spares else self.spares, changes)
            if arena is self.filling or not self.emptied:
                self.filling = None

    def move(self, row: RowId, arena: Arena, changes: list[Change]) -> None:
        """Move a row into the first free slot of an arena that has one."""
        source = self.places[row]
        changes.append(Move(source, self.seat(row, arena, changes)))
        self.vacate(source, changes)

    def _too_many(self, *, tokens: int = 0, slots: int = 0) -> list[Arena]:
        """Return the oldest spares: those that do not fit the bounds beside so much more."""
        kept = self.spares
        tokens += self.tokens + sum(spare.tokens for spare in kept)
        slots += self.slots + sum(spare.slots for spare in kept)
        count = 0
        while count < len(kept) and (tokens > self.tokens_max or slots > self.slots_max):
            tokens -= kept[count].tokens
            slots -= kept[count].slots
            count += 1
        return kept[:count]


def rows_in(arena: Arena) -> list[RowId]:
    """Return an arena's rows by slot."""
    return [row for row in arena.rows if row is not None]
