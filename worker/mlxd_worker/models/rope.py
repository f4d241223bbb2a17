"""Rotary position embedding: which kinds of scaling are understood, and their wavelengths.

Invariants:
- A kind of scaling is honoured or refused by name: an ignored one gives fluent nonsense far out.
- Wavelengths are computed in double precision, once, on the host.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mlxd_shared.config import CONTEXT_LENGTH_LIMIT
from mlxd_worker.models.fields import Fields

ROPE_BASE_DEFAULT = 10_000.0
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def stretch(self, wavelength: float) -> float:
        """Return by how much a rotation of this wavelength (in tokens) is slowed."""
        turns = self.original_context / wavelength
        if turns < self.low_freq_factor:
            return self.factor
        if turns > self.high_freq_factor:
            return 1.0
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1.0 / ((1.0 - kept) / self.factor + kept)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions rotate queries and keys."""

    base: float
    position_scale: float = 1.0
    """Positions are multiplied by this before rotating (linear scaling: 1 / factor)."""
    llama3: Llama3Scaling | None = None
    interleaved: bool = False
    """Whether the pairs are neighbours rather than halves of the head."""

    def periods(self, head_dim: int) -> list[float] | None:
        """Return each pair's tokens per radian, or None where `base` alone says it."""
        if self.llama3 is None:
            return None
        plain = [self.base ** (pair / head_dim) for pair in range(0, head_dim, 2)]
        return [period * self.llama3.stretch(2 * math.pi * period) for period in plain]


def parse_rope(fields: Fields) -> RopeConfig:
    """Return the rotary part of a config.

    Both spellings are read: `rope_scaling` beside `rope_theta`, and `rope_parameters` for both.

    Raises:
        InvalidModel: an unsupported kind, or a wrong or missing parameter of a supported one.
    """
    scaling, key = _scaling(fields)
    base = fields.positive("rope_theta", default=ROPE_BASE_DEFAULT)
    base = scaling.positive("rope_theta", default=base)
    partial = scaling.positive("partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise scaling.error("partial_rotary_factor", f"{partial} is not supported, only 1")
    interleaved = fields.flag("rope_traditional", default=False)
    kind_key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.values.get(kind_key)
    if kind is None:
        if not scaling.has("factor"):
            return RopeConfig(base=base, interleaved=interleaved)
        raise fields.error(key, "has a factor but no rope_type")
    if kind == "default":
        return RopeConfig(base=base, interleaved=interleaved)
    if kind == "linear":
        factor = scaling.positive("factor")
        return RopeConfig(base=base, position_scale=1.0 / factor, interleaved=interleaved)
    if kind == "llama3":
        llama3 = _llama3(scaling)
        return RopeConfig(base=base, llama3=llama3, interleaved=interleaved)
    supported = ", ".join(ROPE_KINDS)
    raise scaling.error(kind_key, f"{kind!r} is not supported; {supported} are")


def _scaling(fields: Fields) -> tuple[Fields, str]:
    both = [key for key in ("rope_scaling", "rope_parameters") if fields.has(key)]
    if len(both) == 2 and fields.values[both[0]] != fields.values[both[1]]:
        raise fields.error("rope_scaling", "contradicts rope_parameters")
    if not both:
        return Fields({}, "rope_scaling."), "rope_scaling"
    values = fields.values[both[0]]
    if not isinstance(values, Mapping):
        raise fields.error(both[0], f"{values!r} is not an object")
    return Fields(values, f"{both[0]}."), both[0]


def _llama3(scaling: Fields) -> Llama3Scaling:
    low = scaling.positive("low_freq_factor")
    high = scaling.positive("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high} is not above low_freq_factor {low}")
    return Llama3Scaling(
        factor=scaling.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=scaling.integer(
            "original_max_position_embeddings", low=1, high=CONTEXT_LENGTH_LIMIT
        ),
    )
