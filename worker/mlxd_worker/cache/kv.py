"""The standard cache: keys and values of every position, in arenas.

Invariants:
- An arena is two arrays `[slots, kv_heads, capacity, head_dim]`; position p of a row is column p.
- A step writes in place. The write's input is this object's only reference to the array, which
  the new array replaces before anything is evaluated; views for attention are taken of the new
  array and die with the step. Measured on a 32 MiB arena, one token for each of 16 rows:
  scatter 0.05 ms, put_along_axis 0.06 ms, a block through slice_update 0.02 ms, and 23 ms
  (a whole copy) as soon as one view of the old array is alive.
- `attend_joined` writes into the arrays themselves, unseen by MLX: see `decode_attention`.
- Ragged rows are written by one scatter over (slot, position): slice_update has one start for all
  rows, and put_along_axis needs an index as large as the values. A single row is one block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlxd_worker.cache.attention import (
    attend_row,
    attend_slots,
    by_slot,
    from_slots,
    members,
    visible_by_slot,
)
from mlxd_worker.cache.base import ArenaId, Kind, Place, RowError
from mlxd_worker.cache.plan import Group, StepPlan
from mlxd_worker.kernels.decode_attention import Target, attend_in_place, tickets_of


@dataclass(frozen=True, slots=True)
class Asked:
    """One pass's part of several that are joined: as `KVCache.attend` takes it."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    plan: StepPlan


class _Arena:
    """Keys and values of the rows of one arena."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys = keys
        self.values = values


class KVCache:
    """One layer's standard cache. One owner: the engine thread."""

    def __init__(
        self, *, kv_heads: int, head_dim: int, dtype: mx.Dtype, value_dim: int | None = None
    ) -> None:
        """Return a cache without arenas; values are as wide as keys where nothing else is said."""
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.dtype = dtype
        self._arenas: dict[ArenaId, _Arena] = {}

    @property
    def kind(self) -> Kind:
        """STANDARD."""
        return Kind.STANDARD

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        return sum(arena.keys.nbytes + arena.values.nbytes for arena in self._arenas.values())

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes of one row's keys and values in an arena of `capacity`."""
        return self.kv_heads * capacity * (self.head_dim + self.value_dim) * self.dtype.size

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        named: dict[str, mx.array] = {}
        for arena_id, arena in self._arenas.items():
            named[f"keys.{arena_id}"] = arena.keys
            named[f"values.{arena_id}"] = arena.values
        return named

    def lend(self, arena: ArenaId) -> tuple[mx.array, ...]:
        """Give an arena's arrays away, until they are settled again."""
        lent = self._arenas.pop(arena)
        return lent.keys, lent.values

    def settle(self, arena: ArenaId, arrays: Sequence[mx.array]) -> None:
        """Take an arena's arrays."""
        keys, values = arrays
        self._arenas[arena] = _Arena(keys, values)

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena; its slots are zero."""
        keys = self._zeros(slots, capacity, self.head_dim)
        values = self._zeros(slots, capacity, self.value_dim)
        mx.eval(keys, values)
        self._arenas[arena] = _Arena(keys, values)

    def reuse(self, spare: ArenaId, arena: ArenaId) -> None:
        """Give an arena without rows another name; it stays as it is."""
        self._arenas[arena] = self._arenas.pop(spare)

    def close(self, arena: ArenaId) -> None:
        """Release an arena."""
        del self._arenas[arena]

    def move(self, source: Place, target: Place) -> None:
        """Copy one row; the rest of a larger target keeps what it held."""
        taken, given = self._arenas[source.arena], self._arenas[target.arena]
        keys, values = row_copy(taken.keys, source.slot), row_copy(taken.values, source.slot)
        if taken is given:  # written to while it is still read, an arena would be copied whole
            mx.eval(keys, values)
        given.keys = put(given.keys, target.slot, 0, keys)
        given.values = put(given.values, target.slot, 0, values)
        # Together: on a GPU each wait for the device costs a tenth of a millisecond.
        mx.eval(given.keys, given.values)

    def clear(self, place: Place) -> None:
        """Zero one slot."""
        arena = self._arenas[place.arena]
        arena.keys = put(arena.keys, place.slot, 0, self._zeros(1, place.capacity, self.head_dim))
        zeros = self._zeros(1, place.capacity, self.value_dim)
        arena.values = put(arena.values, place.slot, 0, zeros)
        mx.eval(arena.keys, arena.values)

    def free(self, place: Place) -> None:
        """Do nothing: the slot stays, and is zeroed for its next row."""

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return keys and values `[1, kv_heads, stop - start, head_dim]`, compact, lazy."""
        arena = self._arenas[place.arena]
        return tuple(
            columns_copy(array, place.slot, start, stop) for array in (arena.keys, arena.values)
        )

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read(_, start, stop)` returned.

        Raises:
            RowError: `state` is not that of [start, stop), or the place is too small for it.
        """
        keys, values = state
        if keys.shape[2] != stop - start or stop > place.capacity:
            problem = f"{keys.shape[2]} positions for [{start}, {stop})"
            raise RowError(f"{problem} in a capacity of {place.capacity}")
        arena = self._arenas[place.arena]
        arena.keys = put(arena.keys, place.slot, start, keys)
        arena.values = put(arena.values, place.slot, start, values)
        mx.eval(arena.keys, arena.values)

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell that a row can go back anywhere: the next write lands there."""
        return 0 <= target <= offset

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        plan: StepPlan,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write keys and values `[N, kv_heads, width, head_dim]`; return what the queries read.

        `queries` and the result are `[N, heads, width, head_dim]`, in the batch's order, lazy.
        """
        self._write(keys, values, plan)
        return self._read(queries, plan, scale=scale, sinks=sinks)

    def fetch(
        self, keys: mx.array, values: mx.array, plan: StepPlan, group: Group | None
    ) -> tuple[mx.array, mx.array]:
        """Write one part of a pass, a group's rows or the chunk; return what it may read, lazy.

        All is slot by slot, `[slots_used, kv_heads, *, *]`, or the chunk's one row; column p is
        position p. The result's views die with the step.
        """
        if group is None:
            assert plan.chunk is not None, "a pass without groups is a chunk"
            self._write(keys, values, plan)
            arena, slot = self._arenas[plan.chunk.arena], plan.chunk.slot
            row, span = slice(slot, slot + 1), plan.chunk.length
            return arena.keys[row, :, :span], arena.values[row, :, :span]
        arena = self._arenas[group.arena]
        at = (group.write_slots, slice(None), group.write_positions)
        arena.keys[at] = from_slots(keys, group).transpose(0, 2, 1, 3)
        if self.value_dim:  # to scatter nothing ends the process: MLX divides by its size
            arena.values[at] = from_slots(values, group).transpose(0, 2, 1, 3)
        rows, columns = slice(group.slots_used), slice(group.span)
        return arena.keys[rows, :, columns], arena.values[rows, :, columns]

    def attend_joined_passes(
        self, asked: Sequence[Asked], *, scale: float, sinks: mx.array | None = None
    ) -> list[mx.array]:
        """Do `attend` for several passes, no row being in two; return what each one reads.

        All write before any reads: a view of an array that is still to be written would copy it.
        """
        for part in asked:
            self._write(part.keys, part.values, part.plan)
        return [self._read(part.queries, part.plan, scale=scale, sinks=sinks) for part in asked]

    def attend_joined(
        self, joined: mx.array, periods: mx.array, plan: StepPlan, *, heads: int, scale: float
    ) -> mx.array:
        """Do `attend` for one token a row by a kernel that writes the arenas in place.

        joined: queries, keys and values `[N, (heads + 2 kv_heads) * head_dim]`, not rotated yet, by
        `periods` (see `attend_in_place`). The result is `[N, heads * head_dim]`, in the batch's
        order, lazy; the arenas hold the tokens once it has been evaluated.
        """
        parts = []
        for index, group in enumerate(plan.groups):
            assert group.targets is not None, "a plan of a pass in place"
            arena = self._arenas[group.arena]
            tickets = tickets_of(index, group.count * self.kv_heads)
            rows = joined[group.first : group.first + group.count]
            at = Target(group.targets, arena.keys, arena.values, tickets)
            parts.append(attend_in_place(rows, periods, at, heads=heads, scale=scale))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def _write(self, keys: mx.array, values: mx.array, plan: StepPlan) -> None:
        """Write a pass's tokens."""
        if plan.chunk is None:
            for group in plan.groups:
                self._write_group(keys, values, group, plan)
            return
        arena, start = self._arenas[plan.chunk.arena], plan.chunk.start
        arena.keys = mx.slice_update(arena.keys, keys, start, axes=(0, 2))
        arena.values = mx.slice_update(arena.values, values, start, axes=(0, 2))

    def _read(
        self, queries: mx.array, plan: StepPlan, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Return what a pass's queries read of what has been written."""
        chunk = plan.chunk
        if chunk is not None:
            arena, row = self._arenas[chunk.arena], slice(chunk.slot, chunk.slot + 1)
            return attend_row(
                queries, arena.keys[row], arena.values[row], chunk, plan, scale=scale, sinks=sinks
            )
        parts = [
            self._read_group(queries, group, plan, scale=scale, sinks=sinks)
            for group in plan.groups
        ]
        return plan.in_order(parts)

    def _read_group(
        self,
        queries: mx.array,
        group: Group,
        plan: StepPlan,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        arena, slots = self._arenas[group.arena], group.slots_used
        return attend_slots(
            by_slot(queries, group),
            arena.keys[:slots, :, : group.span],
            arena.values[:slots, :, : group.span],
            visible_by_slot(group, group.span, plan),
            scale=scale,
            sinks=sinks,
        )

    def _write_group(self, keys: mx.array, values: mx.array, group: Group, plan: StepPlan) -> None:
        """Write a batch's tokens, each row's at its own position; only these are touched."""
        arena = self._arenas[group.arena]
        # Made once a pass: with a slice among the indices each layer would make its own.
        slots, heads, positions = (
            plan.shared(
                ("write", group.arena, self.kv_heads, axis),
                partial(_target, group, self.kv_heads, axis),
            )
            for axis in range(3)
        )
        arena.keys[slots, heads, positions] = members(keys, group)
        arena.values[slots, heads, positions] = members(values, group)

    def _zeros(self, slots: int, capacity: int, width: int) -> mx.array:
        return mx.zeros((slots, self.kv_heads, capacity, width), dtype=self.dtype)


def _target(group: Group, heads: int, axis: int) -> mx.array:
    """Return the slots, heads or positions that a batch writes to, `[m, heads, width]`."""
    numbers = mx.arange(heads, dtype=mx.int32)[None, :, None]
    indices = (group.write_slots[:, :, None], numbers, group.write_positions[:, None])
    shape = (group.write_slots.shape[0], heads, group.write_positions.shape[1])
    return mx.contiguous(mx.broadcast_to(indices[axis], shape))


def put(array: mx.array, slot: int, column: int, block: mx.array) -> mx.array:
    """Return an arena's array with `block` written from a slot's column on, lazy."""
    return mx.slice_update(array, block, mx.array([slot, column], dtype=mx.int32), axes=(0, 2))


def row_copy(array: mx.array, slot: int) -> mx.array:
    """Return one row of an arena's array as memory of its own, lazy."""
    # Gathered, not sliced: a view would make the next write to this arena copy all of it.
    return mx.take(array, mx.array([slot]), axis=0)


def columns_copy(array: mx.array, slot: int, start: int, stop: int) -> mx.array:
    """Return columns [start, stop) of one row as memory of their own.

    Two parts joined are always copied; a slice, even `mx.contiguous` of one, may share the arena.
    """
    row = slice(slot, slot + 1)
    if stop - start < 2:
        return mx.take(array[row], mx.arange(start, stop, dtype=mx.int32), axis=2)
    middle = (start + stop) // 2
    return mx.concatenate([array[row, :, start:middle], array[row, :, middle:stop]], axis=2)
