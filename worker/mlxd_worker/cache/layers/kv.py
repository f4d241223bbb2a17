"""The standard cache: keys and values of every position, in arenas.

Invariants:
- An arena is two arrays `[slots, kv_heads, capacity, head_dim]`; position p of a row is column p.
- A batch's rows are written by one scatter over (slot, position), a single row as one block.
- `attend_joined` writes into the arrays themselves, unseen by MLX: see `decode_attention`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Group, StepPlan
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.layers.attention import Asked, from_slots, members
from mlxd_worker.cache.layers.store import Part, SliceableCache, scatter
from mlxd_worker.kernels.decode_attention import Target, attend_in_place, serves, tickets_of
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

    def _write_group(self, entries: Sequence[mx.array], group: Group, plan: StepPlan) -> None:
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


def _target(group: Group, heads: int, axis: int) -> mx.array:
    """Return the slots, heads or positions that a batch writes to, `[m, heads, width]`."""
    numbers = mx.arange(heads, dtype=mx.int32)[None, :, None]
    indices = (group.write_slots[:, :, None], numbers, group.write_positions[:, None])
    shape = (group.write_slots.shape[0], heads, group.write_positions.shape[1])
    return mx.contiguous(mx.broadcast_to(indices[axis], shape))
