"""The standard cache: keys and values of every position, in arenas by capacity class.

Invariants:
- An arena is two arrays `[slots, kv_heads, capacity, head_dim]`; position p of a row is column p.
- A step writes in place. The write's input is this object's only reference to the array, which
  the new array replaces before anything is evaluated; views for attention are taken of the new
  array and die with the step. Measured on a 32 MiB arena, one token for each of 16 rows:
  scatter 0.05 ms, put_along_axis 0.06 ms, a block through slice_update 0.02 ms, and 23 ms
  (a whole copy) as soon as one view of the old array is alive.
- Ragged rows are written by one scatter over (slot, position): slice_update has one start for all
  rows, and put_along_axis needs an index as large as the values. A single row is one block.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlxd_worker.cache.base import Place
from mlxd_worker.cache.plan import Chunk, Group, StepPlan


class _Arena:
    """Keys and values of the rows of one class."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys = keys
        self.values = values


class KVCache:
    """One layer's standard cache. One owner: the engine thread."""

    def __init__(self, *, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        """Return a cache without arenas."""
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self._arenas: dict[int, _Arena] = {}

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        return sum(arena.keys.nbytes + arena.values.nbytes for arena in self._arenas.values())

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes of one row's keys and values in an arena of `capacity`."""
        return 2 * self.kv_heads * capacity * self.head_dim * self.dtype.size

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        named: dict[str, mx.array] = {}
        for capacity, arena in self._arenas.items():
            named[f"keys.{capacity}"] = arena.keys
            named[f"values.{capacity}"] = arena.values
        return named

    def resize(self, capacity: int, *, slots: int) -> None:
        """Give the arena exactly `slots` slots, keeping the first ones; new slots are zero."""
        if slots == 0:
            del self._arenas[capacity]
            return
        arena = self._arenas.get(capacity)
        if arena is None:
            keys, values = self._zeros(slots, capacity), self._zeros(slots, capacity)
            mx.eval(keys, values)
            self._arenas[capacity] = _Arena(keys, values)
            return
        # One array at a time: the old one is freed before the other's new one is made.
        arena.keys = self._resized(arena.keys, slots)
        arena.values = self._resized(arena.values, slots)

    def move(self, source: Place, target: Place) -> None:
        """Copy one row; the rest of a larger target keeps what it held."""
        taken, given = self._arenas[source.capacity], self._arenas[target.capacity]
        given.keys = _put_row(given.keys, target.slot, _row_copy(taken.keys, source.slot))
        mx.eval(given.keys)
        given.values = _put_row(given.values, target.slot, _row_copy(taken.values, source.slot))
        mx.eval(given.values)

    def clear(self, place: Place) -> None:
        """Zero one slot."""
        arena = self._arenas[place.capacity]
        arena.keys = _put_row(arena.keys, place.slot, self._zeros(1, place.capacity))
        arena.values = _put_row(arena.values, place.slot, self._zeros(1, place.capacity))
        mx.eval(arena.keys, arena.values)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, plan: StepPlan, *, scale: float
    ) -> mx.array:
        """Write keys and values `[N, kv_heads, width, head_dim]`; return what the queries read.

        `queries` and the result are `[N, heads, width, head_dim]`, in the batch's order, lazy.
        """
        if plan.chunk is not None:
            return self._attend_chunk(queries, keys, values, plan.chunk, scale=scale)
        parts = [
            self._attend_group(queries, keys, values, group, scale=scale) for group in plan.groups
        ]
        result = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return result if plan.order is None else mx.take(result, plan.order, axis=0)

    def _attend_chunk(
        self, queries: mx.array, keys: mx.array, values: mx.array, chunk: Chunk, *, scale: float
    ) -> mx.array:
        arena = self._arenas[chunk.capacity]
        arena.keys = mx.slice_update(arena.keys, keys, chunk.start, axes=(0, 2))
        arena.values = mx.slice_update(arena.values, values, chunk.start, axes=(0, 2))
        row = slice(chunk.slot, chunk.slot + 1)
        return mx.fast.scaled_dot_product_attention(
            queries,
            arena.keys[row, :, : chunk.length],
            arena.values[row, :, : chunk.length],
            scale=scale,
            mask="causal" if queries.shape[2] > 1 else None,
        )

    def _attend_group(
        self, queries: mx.array, keys: mx.array, values: mx.array, group: Group, *, scale: float
    ) -> mx.array:
        arena = self._arenas[group.capacity]
        at = (group.write_slots, slice(None), group.write_positions)
        arena.keys[at] = _members(keys, group).transpose(0, 2, 1, 3)
        arena.values[at] = _members(values, group).transpose(0, 2, 1, 3)
        asked = _members(queries, group) if group.queriers is None else queries[group.queriers]
        slots, heads, width, _ = asked.shape
        # The heads that share keys become query positions of one head: with one position a row an
        # array mask would switch every fused kernel off.
        shared = heads // self.kv_heads
        mask = mx.broadcast_to(group.mask[:, :, None], (slots, 1, shared, width, group.span))
        result = mx.fast.scaled_dot_product_attention(
            asked.reshape(slots, self.kv_heads, shared * width, self.head_dim),
            arena.keys[:slots, :, : group.span],
            arena.values[:slots, :, : group.span],
            scale=scale,
            mask=mask.reshape(slots, 1, shared * width, group.span),
        )
        return result.reshape(slots, heads, width, self.head_dim)

    def _zeros(self, slots: int, capacity: int) -> mx.array:
        return mx.zeros((slots, self.kv_heads, capacity, self.head_dim), dtype=self.dtype)

    def _resized(self, array: mx.array, slots: int) -> mx.array:
        if slots < array.shape[0]:
            # A slice would keep the whole old arena alive; gathering copies the rows that stay.
            kept = mx.take(array, mx.arange(slots), axis=0)
        else:
            # No name for the zeros: it would keep them, and the rows could not go in in place.
            kept = mx.slice_update(
                self._zeros(slots, array.shape[2]), array, mx.array([0]), axes=(0,)
            )
        mx.eval(kept)
        return kept


def _members(array: mx.array, group: Group) -> mx.array:
    if group.members is not None:
        return array[group.members]
    if group.count == array.shape[0]:
        return array
    return array[group.first : group.first + group.count]


def _row_copy(array: mx.array, slot: int) -> mx.array:
    # Gathered, not sliced, and evaluated: a view would make the write that follows copy the arena.
    row = mx.take(array, mx.array([slot]), axis=0)
    mx.eval(row)
    return row


def _put_row(array: mx.array, slot: int, row: mx.array) -> mx.array:
    return mx.slice_update(array, row, mx.array([slot]), axes=(0,))
