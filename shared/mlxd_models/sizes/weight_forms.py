"""The forms in which weights live in memory, and what a model's weights take in them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Packed:
    """A model's weights where those that are stored packed stay so."""

    kept_nbytes: int
    """Packed values, and scales that are bytes."""
    values: int
    """Scales, offsets, and all that is not packed."""
    unpacked_values: int
    """The most that is unpacked at once, for a pass of many rows."""
