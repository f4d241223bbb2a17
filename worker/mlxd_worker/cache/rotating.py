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
    attend_chunk,
    attend_row,
    attend_slots,
    by_slot,
    from_slots,
    members,
    padded_width,
    visible_by_slot,
)
from mlxd_worker.cache.base import ArenaId, Kind, Place, RowError
from mlxd_worker.cache.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.rings import columns_copy, put, ring_copy, sliding_mask


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

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        window: int,
        dtype: mx.Dtype,
        value_dim: int | None = None,
    ) -> None:
        """Return a cache without arenas; `window` counts the query's own position.

        Values are as wide as keys where nothing else is said.
        """
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
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
        wide = self.head_dim + self.value_dim
        return self.kv_heads * self._ring(capacity) * wide * self.dtype.size

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        named: dict[str, mx.array] = {}
        for arena_id, arena in self._arenas.items():
            named[f"keys.{arena_id}"] = arena.keys
            named[f"values.{arena_id}"] = arena.values
        return named

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena; its slots are zero."""
        keys, values = self._zeros(slots, capacity)
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
        keys, values = ring_copy(taken.keys, source.slot), ring_copy(taken.values, source.slot)
        if taken is given:  # written to while it is still read, an arena would be copied whole
            mx.eval(keys, values)
        given.keys = put(given.keys, target.slot, 0, keys)
        mx.eval(given.keys)
        given.values = put(given.values, target.slot, 0, values)
        mx.eval(given.values)

    def clear(self, place: Place) -> None:
        """Zero one slot."""
        arena = self._arenas[place.arena]
        keys, values = self._zeros(1, place.capacity)
        arena.keys = put(arena.keys, place.slot, 0, keys)
        arena.values = put(arena.values, place.slot, 0, values)
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
            columns_copy(array, place.slot, first, count) for array in (arena.keys, arena.values)
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

        `queries` and the result are `[N, heads, width, head_dim]`, in the batch's order. Lazy, but
        for several tokens of a row that wrap: then the result has been evaluated.
        """
        if plan.chunk is not None:
            return self._attend_chunk(
                queries, keys, values, plan.chunk, plan, scale=scale, sinks=sinks
            )
        parts = [
            self._attend_group(queries, keys, values, group, plan, scale=scale, sinks=sinks)
            for group in plan.groups
        ]
        return plan.in_order(parts)

    def fetch(
        self, keys: mx.array, values: mx.array, plan: StepPlan, group: Group | None
    ) -> tuple[mx.array, mx.array]:
        """Write one part of a pass, a group or the chunk; return what it may read.

        All is slot by slot. Columns are the ring's, position p being column `p % ring`; but where
        several tokens wrap they are copies of the positions before them (a chunk's in order, up to
        the window; a group's as the ring has them), and then their own. Lazy, but for such a chunk.
        """
        if group is None:
            assert plan.chunk is not None, "a pass without groups is a chunk"
            return self._fetch_chunk(keys, values, plan.chunk, plan)
        arena, slots = self._arenas[group.arena], group.slots_used
        written = from_slots(keys, group), from_slots(values, group)
        if keys.shape[2] == 1 or group.span <= arena.ring:
            self._scatter(arena, group, *written)
            seen = min(group.span, arena.ring)
            return arena.keys[:slots, :, :seen], arena.values[:slots, :, :seen]
        used = mx.arange(slots, dtype=mx.int32)
        held = [mx.take(array, used, axis=0) for array in (arena.keys, arena.values)]
        mx.eval(held)
        self._scatter(arena, group, *written)
        return _after(held[0], keys), _after(held[1], values)

    def _fetch_chunk(
        self, keys: mx.array, values: mx.array, chunk: Chunk, plan: StepPlan
    ) -> tuple[mx.array, mx.array]:
        arena, before = self._arenas[chunk.arena], chunk.length - keys.shape[2]
        if keys.shape[2] == 1 or chunk.length <= arena.ring:
            self._put_positions(arena, chunk.slot, before, keys, values)
            row, seen = slice(chunk.slot, chunk.slot + 1), min(chunk.length, arena.ring)
            return arena.keys[row, :, :seen], arena.values[row, :, :seen]
        held = self.read(plan.places[0], 0, before)
        mx.eval(held)
        whole = _after(held[0], keys), _after(held[1], values)
        kept = tuple(array[:, :, -self.window :] for array in whole)
        self.write(plan.places[0], 0, chunk.length, kept)
        return whole

    def _attend_chunk(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        chunk: Chunk,
        plan: StepPlan,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        arena = self._arenas[chunk.arena]
        width = keys.shape[2]
        row = slice(chunk.slot, chunk.slot + 1)
        if chunk.length > arena.ring and width > 1:
            return self._attend_wrapping(
                queries, keys, values, chunk, plan, scale=scale, sinks=sinks
            )
        self._put_positions(arena, chunk.slot, chunk.length - width, keys, values)
        if chunk.length > arena.ring:
            return attend_chunk(
                queries,
                arena.keys[row],
                arena.values[row],
                length=arena.ring,
                scale=scale,
                sinks=sinks,
            )
        return attend_row(
            queries, arena.keys[row], arena.values[row], chunk, plan, scale=scale, sinks=sinks
        )

    def _attend_wrapping(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        chunk: Chunk,
        plan: StepPlan,
        *,
        scale: float,
        sinks: mx.array | None,
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
                sinks=sinks,
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
            lambda: sliding_mask(self.window, chunk.start[1:] + first, held, width, plan.dtype),
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
        sinks: mx.array | None,
    ) -> mx.array:
        arena = self._arenas[group.arena]
        slots, width = group.slots_used, keys.shape[2]
        asked = by_slot(queries, group)
        if width == 1 or group.span <= arena.ring:
            self._scatter(arena, group, members(keys, group), members(values, group))
            seen = min(group.span, arena.ring)
            return attend_slots(
                asked,
                arena.keys[:slots, :, :seen],
                arena.values[:slots, :, :seen],
                visible_by_slot(group, seen, plan),
                scale=scale,
                sinks=sinks,
            )
        mask = plan.shared(
            ("sliding", self.window, group.arena),
            lambda: sliding_mask(
                self.window, group.last_visible[:, 0], arena.ring, width, plan.dtype
            ),
        )
        result = attend_slots(
            asked,
            mx.concatenate([arena.keys[:slots], by_slot(keys, group)], axis=2),
            mx.concatenate([arena.values[:slots], by_slot(values, group)], axis=2),
            mask,
            scale=scale,
            sinks=sinks,
        )
        mx.eval(result)
        self._scatter(arena, group, members(keys, group), members(values, group))
        return result

    def _scatter(self, arena: _Arena, group: Group, keys: mx.array, values: mx.array) -> None:
        # Of more tokens than the ring has columns only the last find room.
        at = (group.write_slots, slice(None), group.write_positions[:, -arena.ring :] % arena.ring)
        arena.keys[at] = keys[:, :, -arena.ring :].transpose(0, 2, 1, 3)
        arena.values[at] = values[:, :, -arena.ring :].transpose(0, 2, 1, 3)

    def _put_positions(
        self, arena: _Arena, slot: int, first: int, keys: mx.array, values: mx.array
    ) -> None:
        """Write `[1, kv_heads, n, head_dim]`, n <= ring, as the positions from `first` on."""
        column = first % arena.ring
        fits = min(keys.shape[2], arena.ring - column)
        arena.keys = put(arena.keys, slot, column, keys[:, :, :fits])
        arena.values = put(arena.values, slot, column, values[:, :, :fits])
        if fits < keys.shape[2]:
            arena.keys = put(arena.keys, slot, 0, keys[:, :, fits:])
            arena.values = put(arena.values, slot, 0, values[:, :, fits:])

    def _ring(self, capacity: int) -> int:
        return min(capacity, self.window)

    def _zeros(self, slots: int, capacity: int) -> tuple[mx.array, mx.array]:
        """Return empty keys and values."""
        shape = (slots, self.kv_heads, self._ring(capacity))
        keys = mx.zeros((*shape, self.head_dim), dtype=self.dtype)
        return keys, mx.zeros((*shape, self.value_dim), dtype=self.dtype)


def _padded(array: mx.array, columns: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, columns), (0, 0)]) if columns else array


def _after(held: mx.array, new: mx.array) -> mx.array:
    return mx.concatenate([held, new], axis=2)
