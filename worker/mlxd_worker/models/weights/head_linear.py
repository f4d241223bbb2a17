"""One matrix for each head, stored as numbers or packed: `[heads, M, inputs]` to as many outputs.

Invariants:
- Weights are `[heads, outputs, inputs]` or, where not `turned`, `[heads, inputs, outputs]`: as a
  checkpoint has them, for a packed one cannot be transposed without being packed anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxd_models.families.common.packing import NVFP4_FULL_SCALE, Packing
from mlxd_worker.kernels.packed_product import packed_product
from mlxd_worker.models.weights.expert_linear import (
    ExpertLinear,
    ExpertProjection,
    PackedExpertLinear,
)
from mlxd_worker.models.weights.linear import packed_rows_max, unpack_rows


class HeadProjection(Protocol):
    """A matrix for each head, however it is stored."""

    def __call__(self, rows: mx.array) -> mx.array:
        """Map `[heads, M, inputs]` to `[heads, M, outputs]`, lazy."""
        ...

    def arrays(self) -> Mapping[str, mx.array]:
        """Return what it holds by name, each array once."""
        ...


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """Weights in numbers."""

    weight: mx.array
    turned: bool

    def __call__(self, rows: mx.array) -> mx.array:
        """Map each head's rows by its own matrix."""
        return rows @ (self.weight.swapaxes(-1, -2) if self.turned else self.weight)

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the weight."""
        return {"weight": self.weight}


@dataclass(frozen=True, slots=True)
class PackedHeadLinear:
    """Weights that stay packed, along their last axis."""

    words: mx.array
    scales: mx.array
    offsets: mx.array | None
    """None where the mode has none."""
    packing: Packing
    turned: bool
    global_scale: mx.array | None = None
    """float32 [] or [heads]: each weight's own scale, times `NVFP4_FULL_SCALE`."""
    form: mx.Dtype | None = None
    """What it yields, where the scales do not say that."""

    def __call__(self, rows: mx.array) -> mx.array:
        """Map each head's rows by its own matrix; unpacks them where that is faster."""
        factor = self._factor()
        # Without its global scale a product may be beyond float16.
        exact = mx.float32 if factor is not None else self.form or self.scales.dtype
        if (factor is not None and rows.dtype == mx.float16) or rows.shape[1] > packed_rows_max():
            weight = unpack_rows(self.words, self.scales, self.offsets, self.packing, form=exact)
            weight = weight if factor is None else (weight * factor).astype(rows.dtype)
            return HeadLinear(weight, turned=self.turned)(rows)
        out = packed_product(
            rows,
            self.words,
            self.scales,
            self.offsets,
            transpose=self.turned,
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            mode=self.packing.mode.value,
        )
        return out if factor is None else (out * factor).astype(rows.dtype)

    def arrays(self) -> Mapping[str, mx.array]:
        """Return all that it holds, by the names that checkpoints have for it."""
        named = {"weight": self.words, "scales": self.scales}
        optional = {"biases": self.offsets, "global_scale": self.global_scale}
        return named | {name: array for name, array in optional.items() if array is not None}

    def _factor(self) -> mx.array | None:
        """Return what each head's weight is multiplied by, `[heads or 1, 1, 1]`; None: nothing."""
        if self.global_scale is None:
            return None
        return self.global_scale.reshape(-1, 1, 1) / NVFP4_FULL_SCALE


def head_projection(stack: ExpertProjection, *, turned: bool) -> HeadProjection:
    """Return a stack of matrices as one for each head; nothing is copied."""
    if isinstance(stack, PackedExpertLinear):
        return PackedHeadLinear(
            stack.words,
            stack.scales,
            stack.offsets,
            stack.packing,
            turned=turned,
            global_scale=stack.global_scale,
            form=stack.form,
        )
    assert isinstance(stack, ExpertLinear), "the only other form"
    return HeadLinear(stack.weight, turned=turned)
