"""The linears of many experts over one input, stored as numbers or packed.

Invariants:
- Each row names its expert; rows that name the same one lie together where `ordered` says so.
- One expert's weight is a part of the stack, not a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxd_worker.models.linear import Linear, PackedLinear, Projection
from mlxd_worker.models.packing import Packing


class ExpertProjection(Protocol):
    """A weight `[experts, outputs, inputs]`, however it is stored."""

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map `[..., 1, inputs]` to `[..., 1, outputs]`, lazy; `experts` `[...]` are uint32."""
        ...

    def of(self, expert: int) -> Projection:
        """Return one expert's linear."""
        ...

    def arrays(self) -> Mapping[str, mx.array]:
        """Return what it holds by name, each array once."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """Weights in numbers."""

    weight: mx.array
    """[experts, outputs, inputs]."""

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert."""
        turned = self.weight.swapaxes(-1, -2)
        return mx.gather_mm(rows, turned, rhs_indices=experts, sorted_indices=ordered)

    def of(self, expert: int) -> Projection:
        """Return one expert's linear."""
        return Linear(self.weight[expert])

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the weight."""
        return {"weight": self.weight}


@dataclass(frozen=True, slots=True)
class PackedExpertLinear:
    """Weights that stay packed."""

    words: mx.array
    """uint32 [experts, outputs, packing.words(inputs)]."""
    scales: mx.array
    """[experts, outputs, packing.groups(inputs)], of the type that rows have."""
    offsets: mx.array
    """The same shape and type: what MLX calls biases."""
    packing: Packing

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert."""
        return mx.gather_qmm(
            rows,
            self.words,
            self.scales,
            self.offsets,
            rhs_indices=experts,
            transpose=True,
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            sorted_indices=ordered,
        )

    def of(self, expert: int) -> Projection:
        """Return one expert's linear."""
        return PackedLinear(
            self.words[expert], self.scales[expert], self.offsets[expert], self.packing
        )

    def arrays(self) -> Mapping[str, mx.array]:
        """Return weight, scales and offsets, by the names that checkpoints have for them."""
        return {"weight": self.words, "scales": self.scales, "biases": self.offsets}
