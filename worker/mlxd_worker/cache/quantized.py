"""The quantised cache: keys and values of every position in 8 or 4 bits, in arenas.

Invariants:
- An arena is three arrays `[slots, 2 * kv_heads, capacity, ...]`, keys' heads first, then values':
  packed integers (uint32), and a scale and a bias for each group of one head's values. Position p
  of a row is column p.
- A token is quantised once, when it is written; nothing is ever quantised again. Moving, reading
  and writing copy bits.
- Writing is in place, as in the standard cache; no reference to an arena's arrays outlives a step.
- Where products of packed integers are scalar loops (CPU), the positions attended are unpacked for
  one layer at a time; elsewhere a decode step multiplies with them as they are, and only a prompt's
  chunk unpacks its row, since a product with many queries is faster unpacked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_shared.cache_sizes import KV_BITS, kv_group_values, kv_held
from mlxd_shared.requests import KVFormat
from mlxd_worker.cache.attention import (
    attend_row,
    attend_slots,
    by_slot,
    folded_sinks,
    members,
    shares_of,
    visible_by_slot,
)
from mlxd_worker.cache.base import ArenaId, Kind, Place, RowError
from mlxd_worker.cache.plan import Chunk, Group, StepPlan
from mlxd_worker.kernels.device import runs_cuda

_NAMES = ("packed", "scales", "biases")


@dataclass(frozen=True, slots=True)
class Packed:
    """Values in few bits: `packed` [..., width * bits / 32], `scales`, `biases` [..., groups]."""

    packed: mx.array
    scales: mx.array
    biases: mx.array

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """All three, in the order of a snapshot."""
        return (self.packed, self.scales, self.biases)


class Packing:
    """How many bits a value takes, and how many values share a scale."""

    def __init__(self, kv: KVFormat, *, head_dim: int) -> None:
        """Return the packing of heads of `head_dim`, which a group must divide."""
        group = kv_group_values(head_dim)
        assert group is not None, "the load refuses such a width"
        self.bits = KV_BITS[kv]
        self.group = group
        self.head_dim = head_dim

    def pack(self, values: mx.array) -> Packed:
        """Return values [..., head_dim] packed; lazy."""
        return Packed(*mx.quantize(values, group_size=self.group, bits=self.bits))

    def unpack(self, stored: Packed) -> mx.array:
        """Return [..., head_dim] in the scales' type; lazy.

        By bytes: `mx.dequantize` on a CPU takes 3 to 5 times as long, an operation for each shift
        of each word.
        """
        integers = mx.view(stored.packed, mx.uint8)
        if self.bits == 4:
            integers = mx.stack([integers & 15, integers >> 4], axis=-1)
        grouped = integers.reshape(*stored.scales.shape, self.group)
        values = grouped * stored.scales[..., None] + stored.biases[..., None]
        return values.reshape(*stored.scales.shape[:-1], self.head_dim)

    def product(self, left: mx.array, stored: Packed, *, transpose: bool) -> mx.array:
        """Return `left` times the stored matrices, or their transposes; lazy."""
        return mx.quantized_matmul(
            left,
            *stored.arrays,
            transpose=transpose,
            group_size=self.group,
            bits=self.bits,
        )


class QuantizedKVCache:
    """One layer's quantised cache. One owner: the engine thread."""

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        kv: KVFormat,
        packed_products: bool | None = None,
    ) -> None:
        """Return a cache without arenas.

        kv: Q8 or Q4. dtype: what the model computes in. packed_products: whether a decode step
        multiplies with packed integers; None where the device decides.
        """
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.format = kv
        self.packing = Packing(kv, head_dim=head_dim)
        if packed_products is None:
            # CUDA's products read whole arrays alone, never a part of an arena: they would raise.
            on_cpu = mx.default_device() == mx.Device(mx.cpu)
            packed_products = not on_cpu and not runs_cuda()
        self.packed_products = packed_products
        self._arenas: dict[ArenaId, Packed] = {}

    @property
    def kind(self) -> Kind:
        """QUANTIZED."""
        return Kind.QUANTIZED

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        return sum(array.nbytes for arena in self._arenas.values() for array in arena.arrays)

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes of one row's keys and values in an arena of `capacity`."""
        values = 2 * self.kv_heads * capacity * self.head_dim
        return kv_held(values, self.format, head_dim=self.head_dim).nbytes(self.dtype.size)

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        return {
            f"{name}.{arena_id}": array
            for arena_id, arena in self._arenas.items()
            for name, array in zip(_NAMES, arena.arrays, strict=True)
        }

    def lend(self, arena: ArenaId) -> tuple[mx.array, ...]:
        """Give an arena's arrays away, until they are settled again."""
        return self._arenas.pop(arena).arrays

    def settle(self, arena: ArenaId, arrays: Sequence[mx.array]) -> None:
        """Take an arena's arrays."""
        packed, scales, biases = arrays
        self._arenas[arena] = Packed(packed, scales, biases)

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena; its slots are zero."""
        made = self._zeros(slots, capacity)
        mx.eval(*made.arrays)
        self._arenas[arena] = made

    def reuse(self, spare: ArenaId, arena: ArenaId) -> None:
        """Give an arena without rows another name; it stays as it is."""
        self._arenas[arena] = self._arenas.pop(spare)

    def close(self, arena: ArenaId) -> None:
        """Release an arena."""
        del self._arenas[arena]

    def move(self, source: Place, target: Place) -> None:
        """Copy one row's bits; the rest of a larger target keeps what it held."""
        row = self.read(source, 0, source.capacity)
        mx.eval(*row)
        self._put(target, 0, Packed(*row))

    def clear(self, place: Place) -> None:
        """Zero one slot."""
        self._put(place, 0, self._zeros(1, place.capacity))

    def free(self, place: Place) -> None:
        """Do nothing: the slot stays, and is zeroed for its next row."""

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return the bits of [start, stop): packed, scales and biases, `[1, 2 * kv_heads, n, ...]`.

        Compact copies, lazy: gathered, since a slice would keep the arena alive.
        """
        columns = mx.arange(start, stop)[None]
        slot = mx.array([[place.slot]])
        return tuple(
            array[slot, :, columns].transpose(0, 2, 1, 3)
            for array in self._arenas[place.arena].arrays
        )

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read(_, start, stop)` returned, bit by bit.

        Raises:
            RowError: `state` is not that of [start, stop), or the place is too small for it.
        """
        packed, scales, biases = state
        if packed.shape[2] != stop - start or stop > place.capacity:
            problem = f"{packed.shape[2]} positions for [{start}, {stop})"
            raise RowError(f"{problem} in a capacity of {place.capacity}")
        self._put(place, start, Packed(packed, scales, biases))

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell that every position stands for itself."""
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
        new = self.packing.pack(mx.concatenate([keys, values], axis=1))
        if plan.chunk is not None:
            return self._attend_chunk(queries, new, plan.chunk, plan, scale=scale, sinks=sinks)
        parts = [
            self._attend_group(queries, new, group, plan, scale=scale, sinks=sinks)
            for group in plan.groups
        ]
        return plan.in_order(parts)

    def _attend_chunk(
        self,
        queries: mx.array,
        new: Packed,
        chunk: Chunk,
        plan: StepPlan,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        self._write_block(chunk.arena, chunk.start, new)
        arena = self._arenas[chunk.arena]
        row = slice(chunk.slot, chunk.slot + 1)
        span = chunk.capacity if plan.bounded_shapes else chunk.length
        keys, values = self._unpacked(Packed(*(array[row, :, :span] for array in arena.arrays)))
        return attend_row(queries, keys, values, chunk, plan, scale=scale, sinks=sinks)

    def _attend_group(
        self,
        queries: mx.array,
        new: Packed,
        group: Group,
        plan: StepPlan,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        self._scatter(new, group)
        arena = self._arenas[group.arena]
        slots, span = group.slots_used, group.span
        seen = Packed(*(array[:slots, :, :span] for array in arena.arrays))
        mask = visible_by_slot(group, span, plan)
        asked = by_slot(queries, group)
        if not self.packed_products:
            keys, values = self._unpacked(seen)
            return attend_slots(asked, keys, values, mask, scale=scale, sinks=sinks)
        return self._attend_packed(asked, seen, mask, scale=scale, sinks=sinks)

    def _attend_packed(
        self,
        asked: mx.array,
        seen: Packed,
        mask: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend without unpacking; heads that share keys are query positions of one head."""
        slots, heads, width, _ = asked.shape
        shared = heads // self.kv_heads
        folded = (asked * scale).reshape(slots, self.kv_heads, shared * width, self.head_dim)
        keys = Packed(*(array[:, : self.kv_heads] for array in seen.arrays))
        values = Packed(*(array[:, self.kv_heads :] for array in seen.arrays))
        scores = self.packing.product(folded, keys, transpose=True)
        span = scores.shape[-1]
        scores = scores.reshape(slots, self.kv_heads, shared, width, span) + mask[:, :, None]
        scores = scores.reshape(*folded.shape[:-1], span)
        weights = shares_of(scores, folded_sinks(sinks, self.kv_heads, width))
        read = self.packing.product(weights, values, transpose=False)
        return read.reshape(slots, heads, width, self.head_dim)

    def _unpacked(self, stored: Packed) -> tuple[mx.array, mx.array]:
        both = self.packing.unpack(stored)
        return both[:, : self.kv_heads], both[:, self.kv_heads :]

    def _scatter(self, new: Packed, group: Group) -> None:
        """Write a batch's tokens, each row's at its own position; only these are touched."""
        at = (group.write_slots, slice(None), group.write_positions)
        for array, given in zip(self._arenas[group.arena].arrays, new.arrays, strict=True):
            array[at] = members(given, group).transpose(0, 2, 1, 3)

    def _put(self, place: Place, column: int, row: Packed) -> None:
        self._write_block(place.arena, mx.array([place.slot, column]), row)
        mx.eval(*self._arenas[place.arena].arrays)

    def _write_block(self, arena_id: ArenaId, start: mx.array, block: Packed) -> None:
        """Write `[1, 2 * kv_heads, n, ...]` from (slot, column) `start` on."""
        arena = self._arenas[arena_id]
        self._arenas[arena_id] = Packed(
            *(
                mx.slice_update(array, given, start, axes=(0, 2))
                for array, given in zip(arena.arrays, block.arrays, strict=True)
            )
        )

    def _zeros(self, slots: int, capacity: int) -> Packed:
        heads, packing = 2 * self.kv_heads, self.packing
        words = self.head_dim * packing.bits // 32
        groups = self.head_dim // packing.group
        scales, biases = (
            mx.zeros((slots, heads, capacity, groups), dtype=self.dtype) for _ in range(2)
        )
        packed = mx.zeros((slots, heads, capacity, words), dtype=mx.uint32)
        return Packed(packed, scales, biases)
