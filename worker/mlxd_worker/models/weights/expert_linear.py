"""The linears of many experts, or of many heads, over one input, stored as numbers or packed.

Invariants:
- Each row names its expert; rows that name the same one lie together where `ordered` says so.
- One expert's weight is a part of the stack, not a copy.
- A head's weight is `[outputs, inputs]` or, where not `turned`, `[inputs, outputs]`: as it is
  stored, because a packed one cannot be transposed without being packed anew.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx

from mlxd_models.families.common.packing import NVFP4_FULL_SCALE
from mlxd_worker.models.weights.linear import (
    AddRanks,
    Linear,
    PackedLinear,
    PackedWeight,
    SideBySide,
    Weighted,
    layout_of,
)


@dataclass(frozen=True, slots=True)
class ExpertLinear(Weighted):
    """Weights in numbers."""

    weight: mx.array
    """[experts, outputs, inputs]."""
    bias: mx.array | None = None
    """[experts, outputs]."""

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map `[..., 1, inputs]` to `[..., 1, outputs]`, lazy; `experts` `[...]` are uint32."""
        turned = self.weight.swapaxes(-1, -2)
        out = mx.gather_mm(rows, turned, rhs_indices=experts, sorted_indices=ordered)
        return _add_bias(out, self.bias, experts)

    def of(self, expert: int) -> Linear:
        """Return one expert's linear."""
        return Linear(_one(self.weight, expert), _part(self.bias, expert))


@dataclass(frozen=True, slots=True)
class PackedExpertLinear(PackedWeight):
    """Weights `[experts, outputs, inputs]` that stay packed, and are never unpacked whole."""

    unpacks: ClassVar[bool] = False

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert, as `ExpertLinear`."""
        out = mx.gather_qmm(
            rows,
            self.words,
            self.scales,
            self.offsets,
            rhs_indices=experts,
            transpose=True,
            global_scale=self.global_scale,
            sorted_indices=ordered,
            **layout_of(self.packing),
        )
        return _add_bias(out, self.bias, experts)

    def of(self, expert: int) -> PackedLinear:
        """Return one expert's linear."""
        one = self.cut(lambda stack: _one(stack, expert))
        bias, scale = _part(self.bias, expert), _part(self.global_scale, expert)
        return PackedLinear(
            one.words, one.scales, one.offsets, self.packing, bias, scale, self.form
        )


@dataclass(frozen=True, slots=True)
class ExpertsSideBySide(Weighted):
    """Several linears of the same experts that have scales of their own, and cannot be joined."""

    parts: tuple[PackedExpertLinear, ...]

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert, as `ExpertLinear`."""
        return mx.concatenate(
            [part(rows, experts, ordered=ordered) for part in self.parts], axis=-1
        )

    def of(self, expert: int) -> SideBySide:
        """Return one expert's linears."""
        return SideBySide(tuple(part.of(expert) for part in self.parts))


@dataclass(frozen=True, slots=True)
class SummedExperts(Weighted):
    """Experts' linears whose inputs are divided among ranks: each one's products are partial.

    Rows are weighted and added before the ranks are, so that there is one sum for all experts.
    """

    part: ExpertLinear | PackedExpertLinear
    """This rank's inputs, without the bias, which is added once, to the sum."""
    add: AddRanks
    bias: mx.array | None = None
    """[experts, outputs]."""

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert, as `ExpertLinear`, to this rank's part of what comes out."""
        return self.part(rows, experts, ordered=ordered)

    def of(self, expert: int) -> Linear | PackedLinear:
        """Return one expert's linear, whose products are partial."""
        return self.part.of(expert)

    def complete(self, mixed: mx.array, weights: mx.array, chosen: mx.array) -> mx.array:
        """Return `[M, outputs]`, the same on all ranks, of each one's partial `mixed`; lazy.

        weights, chosen: `[M, chosen]`, by which experts were mixed.
        """
        whole = self.add(mixed)
        if self.bias is None:
            return whole
        return whole + (self.bias[chosen] * weights[..., None]).sum(axis=1)


ExpertProjection = ExpertLinear | PackedExpertLinear | ExpertsSideBySide | SummedExperts
"""A weight `[experts, outputs, inputs]`, however it is stored."""


@dataclass(frozen=True, slots=True)
class HeadLinear(Weighted):
    """A matrix for each head, in numbers."""

    weight: mx.array
    turned: bool

    def __call__(self, rows: mx.array) -> mx.array:
        """Map `[heads, M, inputs]` to `[heads, M, outputs]`, lazy."""
        return rows @ (self.weight.swapaxes(-1, -2) if self.turned else self.weight)


@dataclass(frozen=True, slots=True)
class PackedHeadLinear(PackedWeight):
    """Matrices that stay packed, along their last axis."""

    turned: bool = True

    def __call__(self, rows: mx.array) -> mx.array:
        """Map each head's rows, as `HeadLinear`; unpacks the matrices where that is faster."""
        # What each head's weight is multiplied by, `[heads or 1, 1, 1]`; None: nothing.
        factor = None
        if self.global_scale is not None:
            factor = self.global_scale.reshape(-1, 1, 1) / NVFP4_FULL_SCALE
        # Without its global scale a product may be beyond float16.
        exact = self.dtype if factor is None else mx.float32
        unsafe = factor is not None and rows.dtype == mx.float16
        if unsafe or not self.stays_packed(rows.shape[1]):
            weight = replace(self, global_scale=None).numbers(exact)
            weight = weight if factor is None else (weight * factor).astype(rows.dtype)
            return HeadLinear(weight, turned=self.turned)(rows)
        out = self.product(rows, transpose=self.turned)
        return out if factor is None else (out * factor).astype(rows.dtype)


HeadProjection = HeadLinear | PackedHeadLinear
"""A matrix for each head, however it is stored."""


def head_projection(stack: ExpertProjection, *, turned: bool) -> HeadProjection:
    """Return a stack of matrices as one for each head; nothing is copied."""
    if isinstance(stack, ExpertLinear):
        return HeadLinear(stack.weight, turned=turned)
    assert isinstance(stack, PackedExpertLinear), "one stack has nothing beside it"
    return packed_heads(stack, turned=turned)


def packed_heads(packed: PackedWeight, *, turned: bool) -> PackedHeadLinear:
    """Return matrices that are packed head by head as what maps each head's rows."""
    parts = (packed.words, packed.scales, packed.offsets, packed.packing, None)
    return PackedHeadLinear(*parts, packed.global_scale, packed.form, turned=turned)


def _add_bias(out: mx.array, bias: mx.array | None, experts: mx.array) -> mx.array:
    return out if bias is None else out + bias[experts][..., None, :]


def _one(stack: mx.array, expert: int) -> mx.array:
    """Return one expert's part as a view: an index would gather it, which copies it."""
    return mx.squeeze(stack[expert : expert + 1], axis=0)


def _part(stack: mx.array | None, expert: int) -> mx.array | None:
    return None if stack is None else _one(stack, expert)
