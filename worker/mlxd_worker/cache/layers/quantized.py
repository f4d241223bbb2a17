"""The quantised cache: keys and values of every position in 8 or 4 bits, in arenas.

Invariants:
- An arena is three arrays `[slots, 2 * kv_heads, capacity, ...]`, keys' heads first, then values':
  packed integers (uint32), and a scale and a bias for each group of one head's values. Position p
  of a row is column p.
- A token is quantised once, when it is written; nothing is ever quantised again. Moving, reading
  and writing copy bits.
- Where products of packed integers are scalar loops (CPU), the positions attended are unpacked for
  one layer at a time; elsewhere a decode step multiplies with them as they are, and only a prompt's
  chunk unpacks its row, since a product with many queries is faster unpacked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlxd_models.sizes.cache_sizes import KV_BITS, kv_group_values
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import Group
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.layers.attention import (
    Asked,
    by_slot,
    folded_sinks,
    seen_of,
    shares_of,
    visible_by_slot,
)
from mlxd_worker.cache.layers.store import Part, SliceableCache
from mlxd_worker.kernels.device import runs_cpu, runs_cuda


class Packed(NamedTuple):
    """Values in few bits: `packed` [..., width * bits / 32], `scales`, `biases` [..., groups]."""

    packed: mx.array
    scales: mx.array
    biases: mx.array


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
        group, bits = self.group, self.bits
        return mx.quantized_matmul(left, *stored, transpose=transpose, group_size=group, bits=bits)


class QuantizedKVCache(SliceableCache):
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
        self.packing = Packing(kv, head_dim=head_dim)
        if packed_products is None:
            # CUDA's products read whole arrays alone, never a part of an arena: they would raise.
            packed_products = not runs_cpu() and not runs_cuda()
        self.packed_products = packed_products
        heads, words = 2 * kv_heads, head_dim * self.packing.bits // 32
        groups = head_dim // self.packing.group
        parts = (
            Part("packed", heads, words, mx.uint32),
            Part("scales", heads, groups, dtype),
            Part("biases", heads, groups, dtype),
        )
        super().__init__(Kind.QUANTIZED, parts)

    def attend(self, inputs: Asked) -> mx.array:
        """Write keys and values; return what the queries read, in their shape and order. Lazy."""
        return self._attend(
            inputs, self.packing.pack(mx.concatenate([inputs.keys, inputs.values], axis=1))
        )

    def _read_group(self, inputs: Asked, group: Group) -> mx.array:
        """Attend without unpacking; heads that share keys are query positions of one head."""
        # A prompt's product, with many queries, is faster unpacked.
        if not self.packed_products or group.chunks is not None:
            return super()._read_group(inputs, group)
        seen = [seen_of(array, group, group.span) for array in self._arenas[group.arena]]
        mask = visible_by_slot(group, group.span, inputs.plan)
        queries = by_slot(inputs.queries, group)
        slots, heads, width, _ = queries.shape
        shared = heads // self.kv_heads
        folded = (queries * inputs.scale).reshape(
            slots, self.kv_heads, shared * width, self.head_dim
        )
        keys = Packed(*(array[:, : self.kv_heads] for array in seen))
        values = Packed(*(array[:, self.kv_heads :] for array in seen))
        scores = self.packing.product(folded, keys, transpose=True)
        span = scores.shape[-1]
        scores = scores.reshape(slots, self.kv_heads, shared, width, span) + mask[:, :, None]
        scores = scores.reshape(*folded.shape[:-1], span)
        weights = shares_of(scores, folded_sinks(inputs.sinks, self.kv_heads, width))
        read = self.packing.product(weights, values, transpose=False)
        return read.reshape(slots, heads, width, self.head_dim)

    def _keys_and_values(self, seen: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        both = self.packing.unpack(Packed(*seen))
        return both[:, : self.kv_heads], both[:, self.kv_heads :]
