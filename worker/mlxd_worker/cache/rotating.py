"""The rotating cache: keys and values of a sliding window, in rings.

Invariants:
- An arena is two arrays `[slots, kv_heads, ring, head_dim]`, `ring = min(capacity, window)`;
  position p of a row is column `p % ring`. A row of an arena shorter than the window never wraps.
- A query at position q sees the positions (q - window, q]. After q is written, a ring of `window`
  holds exactly these: one token a row is written first, and the mask is the standard cache's,
  since every column is visible from `q = ring - 1` on.
- Several tokens that wrap would overwrite what the first of them still sees. They attend the old
  ring, in ring order, beside their own keys, and go into the ring when that has been evaluated: a
  read still in the queue would turn the write into a copy of the whole arena (16 slots of 1 MiB:
  a peak of 18.9 MB instead of 2.1). So such a pass cannot be traced by `mx.compile`. It serves
  rows of a batch just as well (for drafts), at the price of copying the rings that it reads.
- Never quantised: a window is small, and its keys are rewritten again and again.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlxd_shared.pass_sizes import PIECE_TOKENS_MIN
from mlxd_worker.cache.attention import (
    CHUNK_WIDTHS,
    additive,
    attend_chunk,
    attend_row,
    attend_slots,
    by_slot,
    members,
    padded_width,
    visible_by_slot,
)
from mlxd_worker.cache.base import ArenaId, Kind, Place, RowError
from mlxd_worker.cache.plan import Chunk, Group, StepPlan


class _Arena:
    """The rings of the rows of one arena."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys = keys
        self.values = values

    @property
    def ring(self) -> int:
        """Columns of a row."""
        return self.keys.shape[2]


class RotatingCache:
    """One layer's sliding window. One owner: the engine thread."""

    def __init__(self, *, kv_heads: int, head_dim: int, window: int, dtype: mx.Dtype) -> None:
        """Return a cache without arenas; `window` counts the query's own position."""
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.window = window
        self.dtype = dtype
        self._arenas: dict[ArenaId, _Arena] = {}

    @property
    def kind(self) -> Kind:
        """ROTATING."""
        return Kind.ROTATING

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        return sum(arena.keys.nbytes + arena.values.nbytes for arena in self._arenas.values())

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes of one row's ring in an arena of `capacity`."""
        return 2 * self.kv_heads * self._ring(capacity) * self.head_dim * self.dtype.size

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        named: dict[str, mx.array] = {}
        for arena_id, arena in self._arenas.items():
            named[f"keys.{arena_id}"] = arena.keys
            named[f"values.{arena_id}"] = arena.values
        return named

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena; its slots are zero."""
        keys, values = self._zeros(slots, capacity), self._zeros(slots, capacity)
        mx.eval(keys, values)
        self._arenas[arena] = _Arena(keys, values)

    def reuse(self, spare: ArenaId, arena: ArenaId) -> None:
        """Give an arena without rows another name; it stays as it is."""
        self._arenas[arena] = self._arenas.pop(spare)

    def close(self, arena: ArenaId) -> None:
        """Release an arena."""
        del self._arenas[arena]

    def move(self, source: Place, target: Place) -> None:
        """Copy one row's ring; the rest of a larger one keeps what it held.

        No column changes: a ring smaller than the target's is one that has not wrapped.
        """
        taken, given = self._arenas[source.arena], self._arenas[target.arena]
        keys, values = _ring_copy(taken.keys, source.slot), _ring_copy(taken.values, source.slot)
        if taken is given:  # written to while it is still read, an arena would be copied whole
            mx.eval(keys, values)
        given.keys = _put(given.keys, target.slot, 0, keys)
        mx.eval(given.keys)
        given.values = _put(given.values, target.slot, 0, values)
        mx.eval(given.values)

    def clear(self, place: Place) -> None:
        """Zero one slot."""
        arena = self._arenas[place.arena]
        arena.keys = _put(arena.keys, place.slot, 0, self._zeros(1, place.capacity))
        arena.values = _put(arena.values, place.slot, 0, self._zeros(1, place.capacity))
        mx.eval(arena.keys, arena.values)

    def free(self, place: Place) -> None:
        """Do nothing: the slot stays, and is zeroed for its next row."""

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return keys and values `[1, kv_heads, n, head_dim]` of the last positions before `stop`.

        n is `min(stop, window)`, whatever `start`; the row stands at `stop`, or further where it
        has not wrapped. Lazy, compact.
        """
        del start
        arena = self._arenas[place.arena]
        count = min(stop, self.window)
        first = (stop - count) % arena.ring
        return tuple(
            _columns_copy(array, place.slot, first, count) for array in (arena.keys, arena.values)
        )

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read(_, start, stop)` returned; the row then stands at `stop`.

        Raises:
            RowError: `state` is not that of a row at `stop`, or the place is too small for it.
        """
        del start
        arena = self._arenas[place.arena]
        keys, values = state
        count = keys.shape[2]
        if count != min(stop, self.window) or stop > place.capacity:
            problem = f"{count} positions before {stop} in a window of {self.window}"
            raise RowError(f"{problem} and a capacity of {place.capacity}")
        self._put_positions(arena, place.slot, stop - count, keys, values)
        mx.eval(arena.keys, arena.values)

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell whether nothing that a row at `target` sees has been overwritten by `offset`."""
        return target == offset or offset <= self.window

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, plan: StepPlan, *, scale: float
    ) -> mx.array:
        """Write keys and values `[N, kv_heads, width, head_dim]`; return what the queries read.

        `queries` and the result are `[N, heads, width, head_dim]`, in the batch's order. Lazy, but
        for several tokens of a row that wrap: then the result has been evaluated.
        """
        if plan.chunk is not None:
            return self._attend_chunk(queries, keys, values, plan.chunk, plan, scale=scale)
        parts = [
            self._attend_group(queries, keys, values, group, plan, scale=scale)
            for group in plan.groups
        ]
        return plan.in_order(parts)

    def _attend_chunk(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        chunk: Chunk,
        plan: StepPlan,
        *,
        scale: float,
    ) -> mx.array:
        arena = self._arenas[chunk.arena]
        width = keys.shape[2]
        row = slice(chunk.slot, chunk.slot + 1)
        if chunk.length > arena.ring and width > 1:
            return self._attend_wrapping(queries, keys, values, chunk, plan, scale=scale)
        self._put_positions(arena, chunk.slot, chunk.length - width, keys, values)
        if chunk.length > arena.ring:
            return attend_chunk(
                queries, arena.keys[row], arena.values[row], length=arena.ring, scale=scale
            )
        return attend_row(queries, arena.keys[row], arena.values[row], chunk, plan, scale=scale)

    def _attend_wrapping(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        chunk: Chunk,
        plan: StepPlan,
        *,
        scale: float,
    ) -> mx.array:
        """Attend several tokens of one row piece by piece, each written before the next reads."""
        arena = self._arenas[chunk.arena]
        row = slice(chunk.slot, chunk.slot + 1)
        width = keys.shape[2]
        before = chunk.length - width
        piece = CHUNK_WIDTHS[-1] if plan.bounded_shapes else max(self.window, PIECE_TOKENS_MIN)
        parts = []
        for first in range(0, width, piece):
            asked, new_keys, new_values = (
                array[:, :, first : first + piece] for array in (queries, keys, values)
            )
            count = asked.shape[2]
            padding = padded_width(count) - count if plan.bounded_shapes else 0
            held = arena.ring if plan.bounded_shapes else min(before + first, arena.ring)
            read = mx.fast.scaled_dot_product_attention(
                _padded(asked, padding),
                mx.concatenate([arena.keys[row, :, :held], _padded(new_keys, padding)], axis=2),
                mx.concatenate([arena.values[row, :, :held], _padded(new_values, padding)], axis=2),
                scale=scale,
                mask=self._chunk_mask(chunk, plan, first, held, count + padding),
            )
            parts.append(read[:, :, :count])
            mx.eval(parts[-1])
            kept = min(count, arena.ring)
            self._put_positions(
                arena,
                chunk.slot,
                before + first + count - kept,
                new_keys[:, :, count - kept :],
                new_values[:, :, count - kept :],
            )
        # Else what each layer writes, and what that is a view of, would be there to the very end.
        mx.eval(arena.keys, arena.values)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _chunk_mask(
        self, chunk: Chunk, plan: StepPlan, first: int, held: int, width: int
    ) -> mx.array:
        return plan.shared(
            ("sliding", self.window, chunk.arena, first),
            lambda: self._sliding_mask(chunk.start[1:] + first, held, width, plan.dtype),
        )

    def _attend_group(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        group: Group,
        plan: StepPlan,
        *,
        scale: float,
    ) -> mx.array:
        arena = self._arenas[group.arena]
        slots, width = group.slots_used, keys.shape[2]
        asked = by_slot(queries, group)
        if width == 1 or group.span <= arena.ring:
            self._scatter(arena, group, keys, values)
            seen = min(group.span, arena.ring)
            return attend_slots(
                asked,
                arena.keys[:slots, :, :seen],
                arena.values[:slots, :, :seen],
                visible_by_slot(group, seen, plan),
                scale=scale,
            )
        mask = plan.shared(
            ("sliding", self.window, group.arena),
            lambda: self._sliding_mask(group.last_visible[:, 0], arena.ring, width, plan.dtype),
        )
        result = attend_slots(
            asked,
            mx.concatenate([arena.keys[:slots], by_slot(keys, group)], axis=2),
            mx.concatenate([arena.values[:slots], by_slot(values, group)], axis=2),
            mask,
            scale=scale,
        )
        mx.eval(result)
        self._scatter(arena, group, keys, values)
        return result

    def _sliding_mask(self, first: mx.array, held: int, width: int, dtype: mx.Dtype) -> mx.array:
        """Return `[rows, 1, width, held + width]` for rings before the position `first` [rows].

        The first `held` columns are the ring's, which has as many as the window; the others are the
        positions from `first` on.
        """
        first = first[:, None]
        columns = mx.arange(held, dtype=mx.int32)
        steps = mx.arange(width, dtype=mx.int32)
        # The latest position before `first` that falls on the column; negative where there is none.
        old = first - self.window + (columns - first) % self.window
        positions = mx.concatenate([old, first + steps], axis=1)[:, None, None, :]
        asking = (first + steps)[:, None, :, None]
        hidden = (positions < 0) | (positions > asking) | (positions <= asking - self.window)
        return additive(hidden, dtype)

    def _scatter(self, arena: _Arena, group: Group, keys: mx.array, values: mx.array) -> None:
        # Of more tokens than the ring has columns only the last find room.
        at = (group.write_slots, slice(None), group.write_positions[:, -arena.ring :] % arena.ring)
        arena.keys[at] = members(keys, group)[:, :, -arena.ring :].transpose(0, 2, 1, 3)
        arena.values[at] = members(values, group)[:, :, -arena.ring :].transpose(0, 2, 1, 3)

    def _put_positions(
        self, arena: _Arena, slot: int, first: int, keys: mx.array, values: mx.array
    ) -> None:
        """Write `[1, kv_heads, n, head_dim]`, n <= ring, as the positions from `first` on."""
        column = first % arena.ring
        fits = min(keys.shape[2], arena.ring - column)
        arena.keys = _put(arena.keys, slot, column, keys[:, :, :fits])
        arena.values = _put(arena.values, slot, column, values[:, :, :fits])
        if fits < keys.shape[2]:
            arena.keys = _put(arena.keys, slot, 0, keys[:, :, fits:])
            arena.values = _put(arena.values, slot, 0, values[:, :, fits:])

    def _ring(self, capacity: int) -> int:
        return min(capacity, self.window)

    def _zeros(self, slots: int, capacity: int) -> mx.array:
        shape = (slots, self.kv_heads, self._ring(capacity), self.head_dim)
        return mx.zeros(shape, dtype=self.dtype)


def _padded(array: mx.array, columns: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, columns), (0, 0)]) if columns else array


def _put(array: mx.array, slot: int, column: int, block: mx.array) -> mx.array:
    return mx.slice_update(array, block, mx.array([slot, column], dtype=mx.int32), axes=(0, 2))


def _ring_copy(array: mx.array, slot: int) -> mx.array:
    # Gathered, not sliced, and evaluated: a view would make the write that follows copy the arena.
    row = mx.take(array, mx.array([slot]), axis=0)
    mx.eval(row)
    return row


def _columns_copy(array: mx.array, slot: int, first: int, count: int) -> mx.array:
    """Return `count` columns of one row from `first` on, around the ring, as memory of their own.

    Two parts joined are always copied; a slice, even `mx.contiguous` of one, may share the arena,
    and gathering columns is four times slower.
    """
    ring = array.shape[2]
    row = slice(slot, slot + 1)
    if count < 2:
        columns = mx.arange(first, first + count, dtype=mx.int32) % ring
        return mx.take(array[row], columns, axis=2)
    cut = ring - first if first + count > ring else count // 2
    second = (first + cut) % ring
    return mx.concatenate(
        [array[row, :, first : first + cut], array[row, :, second : second + count - cut]], axis=2
    )
