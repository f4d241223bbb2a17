"""The forms in which weights live in memory, and what a model's weights take in them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FloatType(StrEnum):
    """A floating-point form, by its name in safetensors headers."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is FloatType.F32 else 2


@dataclass(frozen=True, slots=True)
class Packed:
    """A model's weights where those that are stored packed stay so."""

    kept_nbytes: int
    """Packed values, and scales that are bytes."""
    values: int
    """Scales, offsets, and all that is not packed."""
    unpacked_values: int
    """The most that is unpacked at once, for a pass of many rows."""
