"""What a layer keeps by slot: a few arrays in each arena, and what the row table does to them.

Invariants:
- An arena has one array for each of the layer's parts, `[slots, heads, columns, width]`, in the
  parts' order. A slot is one row's; what its columns stand for is the kind of layer's own affair.
- A step writes in place. The write's input is the only reference to the array, which the new array
  replaces in the arena's list before anything is evaluated; views for attention are taken of the
  new array and die with the step. Measured on a 32 MiB arena, one token for each of 16 rows:
  scatter 0.05 ms, put_along_axis 0.06 ms, a block through slice_update 0.02 ms, and 23 ms
  (a whole copy) as soon as one view of the old array is alive.
- What is copied out of an arena is memory of its own, gathered or joined, never a slice of it.
- Changes are lazy here: who makes them (`changes`) evaluates those of all layers together, because
  on a GPU each wait for the device costs a tenth of a millisecond.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Group, StepPlan
from mlxd_worker.cache.base import ArenaId, ArrayShape, Kind, Place, RowError
from mlxd_worker.cache.layers.attention import Asked, attend_group, attend_row, members, seen_of


@dataclass(frozen=True, slots=True)
class Part:
    """One of the arrays that a layer has in every arena."""

    name: str
    heads: int
    width: int
    """Of one head's entry in one column."""
    dtype: mx.Dtype

    @property
    def column_nbytes(self) -> int:
        """The bytes of one column of one slot."""
        return self.heads * self.width * self.dtype.size

    def zeros(self, slots: int, columns: int) -> mx.array:
        """Return an empty array, lazy."""
        return mx.zeros((slots, self.heads, columns, self.width), dtype=self.dtype)

    def blank(self, columns: int) -> mx.array:
        """Return zeros to write over one slot, lazy: a view of one entry, which takes no room."""
        entry = mx.zeros((1, 1, 1, self.width), dtype=self.dtype)
        return mx.broadcast_to(entry, (1, self.heads, columns, self.width))


class ArenaCache:
    """One layer's arrays for all rows. One owner: the engine thread.

    A kind of layer states its parts, and adds how a pass writes and attends and what `read` keeps
    of a row.
    """

    def __init__(self, kind: Kind, parts: Sequence[Part]) -> None:
        """Return a cache without arenas; each that is opened has these parts."""
        self.kind: Final = kind
        self._parts = tuple(parts)
        self._arenas: dict[ArenaId, list[mx.array]] = {}

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        return sum(array.nbytes for arrays in self._arenas.values() for array in arrays)

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes of one row in an arena of `capacity`."""
        return self._columns(capacity) * sum(part.column_nbytes for part in self._parts)

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        return {
            f"{part.name}.{arena}": array
            for arena, arrays in self._arenas.items()
            for part, array in zip(self._parts, arrays, strict=True)
        }

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena, lazy; its slots are zero."""
        columns = self._columns(capacity)
        self._arenas[arena] = [part.zeros(slots, columns) for part in self._parts]

    def reuse(self, spare: ArenaId, arena: ArenaId) -> None:
        """Give an arena without rows another name; it stays as it is."""
        self._arenas[arena] = self._arenas.pop(spare)

    def close(self, arena: ArenaId) -> None:
        """Release an arena."""
        del self._arenas[arena]

    def lift(self, place: Place) -> tuple[mx.array, ...]:
        """Return a whole row, each part `[1, heads, columns, width]`, as memory of its own, lazy.

        Gathered, not sliced: a view would make the next write to its arena copy all of that.
        """
        slot = mx.array([place.slot])
        return tuple(mx.take(array, slot, axis=0) for array in self._arenas[place.arena])

    def move(self, source: Place, target: Place, lifted: tuple[mx.array, ...]) -> None:
        """Put down a row that was lifted; the rest of a larger target keeps what it held. Lazy."""
        del source
        self._put(target, 0, lifted)

    def clear(self, place: Place, start: int = 0) -> None:
        """Zero one slot, all of it, lazy."""
        del start
        self._blank(place, 0)

    def free(self, place: Place) -> None:
        """Do nothing: the slot stays, and is cleared for its next row."""

    def shapes(self, start: int, stop: int) -> tuple[ArrayShape, ...]:
        """Return what `read(_, start, stop)` returns, but for its values."""
        count = self._count_kept(start, stop)
        return tuple(
            ArrayShape((1, part.heads, count, part.width), part.dtype) for part in self._parts
        )

    def _count_kept(self, start: int, stop: int) -> int:
        """Return of how many positions `read(_, start, stop)` is."""
        return stop - start

    def _columns(self, capacity: int) -> int:
        """Return the columns of a slot in an arena of `capacity`."""
        return capacity

    def _blank(self, place: Place, column: int) -> None:
        """Zero a slot's columns from `column` on, lazy."""
        columns = self._columns(place.capacity) - column
        if columns:
            self._put(place, column, (part.blank(columns) for part in self._parts))

    def _put(self, place: Place, column: int, blocks: Iterable[mx.array]) -> None:
        """Write a block a part from a slot's column on, lazy."""
        write_block(self._arenas[place.arena], start_at(place.slot, column), blocks)


class SliceableCache(ArenaCache):
    """A layer's arrays where column p is position p, and each position's entry stands for itself.

    Its arrays can go through a function as arguments and results. A kind says what of its columns
    are keys and what values.
    """

    def lend(self, arena: ArenaId) -> tuple[mx.array, ...]:
        """Give an arena's arrays away: until `settle` nothing here refers to them."""
        return tuple(self._arenas.pop(arena))

    def settle(self, arena: ArenaId, arrays: Sequence[mx.array]) -> None:
        """Take an arena's arrays, in the order of `lend`."""
        assert len(arrays) == len(self._parts), "as they were lent"
        self._arenas[arena] = list(arrays)

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return [start, stop) of each part, `[1, heads, stop - start, width]`, compact, lazy."""
        arrays, count = self._arenas[place.arena], stop - start
        return tuple(columns_copy(array, place.slot, start, count) for array in arrays)

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read(_, start, stop)` returned, bit by bit, lazy.

        Raises:
            RowError: `state` is not that of [start, stop), or the place is too small for it.
        """
        count = state[0].shape[2]
        if count != stop - start or stop > place.capacity:
            problem = f"{count} positions for [{start}, {stop})"
            raise RowError(f"{problem} in a capacity of {place.capacity}")
        self._put(place, start, state)

    def clear(self, place: Place, start: int = 0) -> None:
        """Zero one slot from position `start` on, lazy."""
        self._blank(place, start)

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell that a row can go back anywhere: the next write lands there."""
        return 0 <= target <= offset

    def _attend(self, inputs: Asked, entries: Sequence[mx.array]) -> mx.array:
        """Write a part's entries each, `[N, heads, width, *]`; return what the queries read. Lazy.

        All are written before any is read: several groups may live in one arena, and a view of an
        array that is still to be written would copy it.
        """
        self._write(entries, inputs.plan)
        return self._read(inputs)

    def _write(self, entries: Sequence[mx.array], plan: StepPlan) -> None:
        if plan.chunk is not None:
            write_block(self._arenas[plan.chunk.arena], plan.chunk.start, entries)
            return
        for group in plan.groups:
            self._write_group(entries, group, plan)

    def _write_group(self, entries: Sequence[mx.array], group: Group, plan: StepPlan) -> None:
        """Write a batch's tokens, each row's at its own position; only these are touched."""
        del plan
        tokens = (members(entry, group) for entry in entries)
        scatter(self._arenas[group.arena], group.write_slots, group.write_positions, tokens)

    def _read(self, inputs: Asked) -> mx.array:
        plan, chunk = inputs.plan, inputs.plan.chunk
        if chunk is None:
            return plan.in_order([self._read_group(inputs, group) for group in plan.groups])
        row = slice(chunk.slot, chunk.slot + 1)
        span = chunk.capacity if plan.bounded_shapes else chunk.length
        seen = [array[row, :, :span] for array in self._arenas[chunk.arena]]
        return attend_row(inputs, *self._keys_and_values(seen), chunk)

    def _read_group(self, inputs: Asked, group: Group) -> mx.array:
        seen = [seen_of(array, group, group.span) for array in self._arenas[group.arena]]
        return attend_group(inputs, *self._keys_and_values(seen), group)

    def _keys_and_values(self, seen: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Return what queries are compared with and what they read, of each part's columns."""
        keys, values = seen
        return keys, values


def start_at(slot: int, column: int) -> mx.array:
    """Return where a block starts, int32 [2]."""
    return mx.array([slot, column], dtype=mx.int32)


def write_block(arrays: list[mx.array], start: mx.array, blocks: Iterable[mx.array]) -> None:
    """Write `[1, heads, n, width]` a part from (slot, column) `start` on, lazy."""
    for index, block in zip(range(len(arrays)), blocks, strict=True):
        arrays[index] = mx.slice_update(arrays[index], block, start, axes=(0, 2))


def scatter(
    arrays: list[mx.array], slots: mx.array, columns: mx.array, entries: Iterable[mx.array]
) -> None:
    """Write `[m, heads, n, width]` a part to `slots` [m, 1] and `columns` [m, n], lazy.

    Ragged rows take one scatter: slice_update has one start for all rows, and put_along_axis needs
    an index as large as the values. Only what is written is touched.
    """
    at = (slots, slice(None), columns)
    for array, new in zip(arrays, entries, strict=True):
        if new.size:  # to scatter nothing ends the process: MLX divides by its size
            array[at] = new.transpose(0, 2, 1, 3)


def columns_copy(array: mx.array, slot: int, first: int, count: int) -> mx.array:
    """Return `count` columns of one row from `first` on, around the end, as memory of their own.

    Two parts joined are always copied; a slice, even `mx.contiguous` of one, may share the arena,
    and gathering columns is four times slower. Lazy.
    """
    row, columns = slice(slot, slot + 1), array.shape[2]
    if count < 2:
        return mx.take(array[row], mx.arange(first, first + count, dtype=mx.int32), axis=2)
    cut = columns - first if first + count > columns else count // 2
    second = (first + cut) % columns
    return mx.concatenate(
        [array[row, :, first : first + cut], array[row, :, second : second + count - cut]], axis=2
    )
