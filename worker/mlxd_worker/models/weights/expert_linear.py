"""The linears of many experts over one input, stored as numbers or packed.

Invariants:
- Each row names its expert; rows that name the same one lie together where `ordered` says so.
- One expert's weight is a part of the stack, not a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxd_models.families.common.packing import Packing
from mlxd_worker.models.weights.linear import Linear, PackedLinear, Projection, SideBySide


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
    bias: mx.array | None = None
    """[experts, outputs]."""

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert."""
        turned = self.weight.swapaxes(-1, -2)
        out = mx.gather_mm(rows, turned, rhs_indices=experts, sorted_indices=ordered)
        return _add_bias(out, self.bias, experts)

    def of(self, expert: int) -> Projection:
        """Return one expert's linear."""
        return Linear(_one(self.weight, expert), _part(self.bias, expert))

    def arrays(self) -> Mapping[str, mx.array]:
        """Return weight and bias."""
        return _present({"weight": self.weight, "bias": self.bias})


@dataclass(frozen=True, slots=True)
class PackedExpertLinear:
    """Weights that stay packed."""

    words: mx.array
    """uint32 [experts, outputs, packing.words(inputs)]."""
    scales: mx.array
    """[experts, outputs, packing.groups(inputs)], of the type that rows have, or bytes."""
    offsets: mx.array | None
    """The same shape and type, what MLX calls biases; None where the mode has none."""
    packing: Packing
    bias: mx.array | None = None
    """[experts, outputs]."""
    global_scale: mx.array | None = None
    """float32 [experts]: each weight's own scale, times `NVFP4_FULL_SCALE`."""
    form: mx.Dtype | None = None
    """What it yields, where the scales do not say that."""

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert."""
        out = mx.gather_qmm(
            rows,
            self.words,
            self.scales,
            self.offsets,
            rhs_indices=experts,
            transpose=True,
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            mode=self.packing.mode.value,
            global_scale=self.global_scale,
            sorted_indices=ordered,
        )
        return _add_bias(out, self.bias, experts)

    def of(self, expert: int) -> PackedLinear:
        """Return one expert's linear."""
        return PackedLinear(
            _one(self.words, expert),
            _one(self.scales, expert),
            _part(self.offsets, expert),
            self.packing,
            _part(self.bias, expert),
            global_scale=_part(self.global_scale, expert),
            form=self.form,
        )

    def arrays(self) -> Mapping[str, mx.array]:
        """Return all that it holds, by the names that checkpoints have for it."""
        return _present(
            {
                "weight": self.words,
                "scales": self.scales,
                "biases": self.offsets,
                "global_scale": self.global_scale,
                "bias": self.bias,
            }
        )


@dataclass(frozen=True, slots=True)
class ExpertsSideBySide:
    """Several linears of the same experts that have scales of their own, and cannot be joined."""

    parts: tuple[PackedExpertLinear, ...]

    def __call__(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Map each row by its expert."""
        return mx.concatenate(
            [part(rows, experts, ordered=ordered) for part in self.parts], axis=-1
        )

    def of(self, expert: int) -> Projection:
        """Return one expert's linears."""
        return SideBySide(tuple(part.of(expert) for part in self.parts))

    def arrays(self) -> Mapping[str, mx.array]:
        """Return what the parts hold, numbered."""
        return {
            f"{number}.{name}": array
            for number, part in enumerate(self.parts)
            for name, array in part.arrays().items()
        }


def _add_bias(out: mx.array, bias: mx.array | None, experts: mx.array) -> mx.array:
    return out if bias is None else out + bias[experts][..., None, :]


def _present(named: Mapping[str, mx.array | None]) -> Mapping[str, mx.array]:
    return {name: array for name, array in named.items() if array is not None}


def _one(stack: mx.array, expert: int) -> mx.array:
    """Return one expert's part as a view: an index would gather it, which copies it."""
    return mx.squeeze(stack[expert : expert + 1], axis=0)


def _part(stack: mx.array | None, expert: int) -> mx.array | None:
    return None if stack is None else _one(stack, expert)
