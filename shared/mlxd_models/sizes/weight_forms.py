"""The forms in which weights live in memory, and what packed ones take while in use. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from mlxd_shared.domain.requests import Weights


class FloatType(StrEnum):
    """A floating-point form, by its name in safetensors headers."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is FloatType.F32 else 2


AS_NUMBERS: Final[Mapping[Weights, FloatType]] = MappingProxyType(
    {
        Weights.FLOAT32: FloatType.F32,
        Weights.BFLOAT16: FloatType.BF16,
        Weights.FLOAT16: FloatType.F16,
    }
)
"""Lives in which every weight is a number of one form."""


LAYER_PREFIX = "model.layers."
TOWER_PREFIX = "vision_tower."

UNPACKED_LAYERS = 4
"""Layers whose weights are unpacked at once, for a pass of many rows."""

EXPERT_MARKS = (".mlp.switch_mlp.", ".mlp.experts.")
"""In the name of every expert's weight, stored together or one by one."""


def is_expert(name: str) -> bool:
    """Tell whether a tensor is an expert's: such weights are never unpacked whole."""
    return any(mark in name for mark in EXPERT_MARKS)


def unpacked_weight_values(weights: Iterable[tuple[str, int]]) -> int:
    """Return the most values that are unpacked at once.

    weights: the name of each packed weight, and how many values it stands for. Those outside of
    layers are a table, or a product of few rows: never unpacked whole. Nor are experts.
    """
    sizes: Counter[str] = Counter()
    for name, values in weights:
        layer, dot, _ = name.removeprefix(LAYER_PREFIX).partition(".")
        if name.startswith(LAYER_PREFIX) and dot and not is_expert(name):
            sizes[layer] += values
    return UNPACKED_LAYERS * max(sizes.values(), default=0)
