"""The standard cache: keys and values of every position, in arenas.

Invariants:
- An arena is two arrays `[slots, kv_heads, capacity, head_dim]`; position p of a row is column p.
- A batch's rows are written by one scatter over (slot, position), a single row as one block.
- `attend_joined` writes into the arrays themselves, unseen by MLX: see `decode_attention`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.base import Kind, LayerCache, Place
from mlxd_worker.cache.layers.attention import (
    Asked,
    attend_causally,
    attend_row,
    causal_width,
    from_slots,
    members,
)
from mlxd_worker.cache.layers.store import Part, SliceableCache, scatter
from mlxd_worker.kernels.decode_attention import Target, attend_in_place, serves, tickets_of
from mlxd_worker.kernels.row_copies import Range, copy_range, put_range
from mlxd_worker.kernels.row_copies import serves as copies_serve
from mlxd_worker.kernels.token_writes import write_in_place


class KVCache(SliceableCache):
    """One layer's standard cache. One owner: the engine thread."""

    def __init__(
        self, *, kv_heads: int, head_dim: int, dtype: mx.Dtype, value_dim: int | None = None
    ) -> None:
        """Return a cache without arenas; by default values are as wide as keys."""
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.dtype = dtype
        parts = (
            Part("keys", kv_heads, self.head_dim, dtype),
            Part("values", kv_heads, self.value_dim, dtype),
        )
        super().__init__(Kind.STANDARD, parts)

    def attend(self, inputs: Asked) -> mx.array:
        """Write keys and values; return what the queries read, in their shape and order. Lazy."""
        chunk = inputs.plan.chunk
        if chunk is not None and chunk.span and self.copies:
            return self._attend_by_kernels(inputs, chunk)
        return self._attend(inputs, (inputs.keys, inputs.values))

    def fetch(
        self, keys: mx.array, values: mx.array, plan: StepPlan, group: Group | None
    ) -> tuple[mx.array, mx.array]:
        """Write one part of a pass, a group's rows or the chunk; return what it may read, lazy.

        All is slot by slot, `[slots_used, kv_heads, *, *]`, or the chunk's one row; column p is
        position p. The result's views die with the step.
        """
        if group is None:
            assert plan.chunk is not None, "a pass without groups is a chunk"
            self._write((keys, values), plan)
            arrays, slot = self._arenas[plan.chunk.arena], plan.chunk.slot
            rows, columns = slice(slot, slot + 1), slice(plan.chunk.length)
        else:
            arrays = self._arenas[group.arena]
            tokens = (from_slots(new, group) for new in (keys, values))
            scatter(arrays, group.write_slots, group.write_positions, tokens)
            rows, columns = slice(group.slots_used), slice(group.span)
        seen_keys, seen_values = (array[rows, :, columns] for array in arrays)
        return seen_keys, seen_values

    def attend_joined_passes(self, parts: Sequence[Asked]) -> list[mx.array]:
        """Do `attend` for several passes, no row being in two; return what each one reads.

        All write before any reads: a view of an array that is still to be written would copy it.
        """
        for part in parts:
            self._write((part.keys, part.values), part.plan)
        return [self._read(part) for part in parts]

    def attends_joined(self, *, heads: int) -> bool:
        """Tell whether `attend_joined` serves here for so many heads of queries."""
        return self.value_dim == self.head_dim and serves(
            heads=heads, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=self.dtype
        )

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
            keys, values = self._arenas[group.arena]
            tickets = tickets_of(index, group.count * self.kv_heads)
            rows = joined[group.first : group.first + group.count]
            at = Target(group.targets, keys, values, tickets)
            if plan.writes_first:
                at = replace(at, places=write_in_place(rows, periods, at, heads=heads))
            parts.append(attend_in_place(rows, periods, at, heads=heads, scale=scale))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    @property
    def puts(self) -> bool:
        """Whether `put` serves here."""
        return self.copies

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """As any sliceable cache's, by a kernel where there is one."""
        if not self.copies:
            return super().read(place, start, stop)
        return copy_range(self.range_at(place, start), stop - start)

    def put(
        self,
        place: Place,
        start: int,
        stop: int,
        source: Place | tuple[mx.array, ...],
        *,
        at: int = 0,
    ) -> list[mx.array]:
        """Write [start, stop) of another row, or of what `read` returned from `start` on; lazy.

        It goes behind what is under way, and nobody waits: once the result is dispatched, whatever
        is dispatched later finds it there. at: of arrays that have several layers', this one's.
        """
        if isinstance(source, Place):
            origin = self.range_at(source, start)
        else:
            keys, values = source
            origin = Range(keys, values, slot=at, start=0)
        return [put_range(origin, self.range_at(place, start), stop - start)]

    @property
    def copies(self) -> bool:
        """Whether kernels copy a row's positions."""
        return copies_serve(head_dim=self.head_dim, value_dim=self.value_dim, dtype=self.dtype)

    def range_at(self, place: Place, start: int) -> Range:
        """Return a row's positions from `start` on, for those kernels; do not keep it."""
        keys, values = self._arenas[place.arena]
        return Range(keys, values, slot=place.slot, start=start)

    def _attend_by_kernels(self, inputs: Asked, chunk: Chunk) -> mx.array:
        """Do `attend` for one row's chunk in an arena of all rows, of which MLX sees no write.

        Its own write of a block takes as long as the arena is large (decision 0080).
        """
        keys, values = self._arenas[chunk.arena]
        count = inputs.keys.shape[2]
        block = Range(inputs.keys, inputs.values, slot=0, start=0)
        into = Range(keys, values, slot=chunk.slot, start=chunk.length - count)
        written = put_range(block, into, count)
        whole = Range(keys, values, slot=chunk.slot, start=0)
        start = chunk.length - count
        width = None if chunk.lasts else causal_width(start, count, chunk.capacity)
        if width is not None:
            seen = copy_range(whole, start + width, after=written)
            return attend_causally(inputs, *seen, width)
        seen = copy_range(whole, min(chunk.span, chunk.capacity), after=written)
        return attend_row(inputs, *seen, chunk)

    def _write_group(self, entries: Sequence[mx.array], group: Group, plan: StepPlan) -> None:
        """Write a batch's tokens, each row's at its own position; only these are touched."""
        # Made once a pass: with a slice among the indices each layer would make its own.
        at = tuple(
            plan.share(
                ("write", group.arena, group.first, self.kv_heads, axis),
                partial(_target, group, self.kv_heads, axis),
            )
            for axis in range(3)
        )
        for array, new in zip(self._arenas[group.arena], entries, strict=True):
            array[at] = members(new, group)


def copies_all(layers: Iterable[LayerCache | None]) -> bool:
    """Tell whether all layers read the chunk of a prompt from copies of its row."""
    return all(isinstance(layer, KVCache) and layer.copies for layer in layers)


def _target(group: Group, heads: int, axis: int) -> mx.array:
    """Return the slots, heads or positions that a batch writes to, `[m, heads, width]`."""
    numbers = mx.arange(heads, dtype=mx.int32)[None, :, None]
    indices = (group.write_slots[:, :, None], numbers, group.write_positions[:, None])
    shape = (group.write_slots.shape[0], heads, group.write_positions.shape[1])
    return mx.contiguous(mx.broadcast_to(indices[axis], shape))
