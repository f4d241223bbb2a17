"""Rotary position embedding: which kinds of scaling are understood, and their wavelengths.

Invariants:
- A kind of scaling is honoured or refused by name: an ignored one gives fluent nonsense far out.
- Wavelengths are computed in double precision, once, on the host.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlxd_shared.config import CONTEXT_LENGTH_LIMIT
from mlxd_worker.models.fields import Fields

ROPE_BASE_DEFAULT = 10_000.0
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")
BETA_FAST_DEFAULT = 32.0
BETA_SLOW_DEFAULT = 1.0
_BLEND_MIN = 0.001
"""How wide a blend is, in pairs, that begins where it ends."""


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
class YarnScaling:
    """Pairs that turn rarely within the original context are slowed, by their place in the head."""

    factor: float
    original_context: int
    beta_fast: float
    """Pairs that turn more often than this keep their rotation."""
    beta_slow: float
    """Pairs that turn less often than this are slowed by the whole factor."""
    gain: float
    """Queries and keys are multiplied by this."""
    truncate: bool
    """Whether the blend begins and ends at whole pairs."""

    def periods(self, base: float, head_dim: int) -> list[float]:
        """Return each pair's tokens per radian."""
        low, high = (
            self._place(self.beta_fast, base, head_dim),
            self._place(self.beta_slow, base, head_dim),
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or _BLEND_MIN
        found = []
        for pair in range(head_dim // 2):
            plain = base ** (2 * pair / head_dim)
            slowed = min(max((pair - low) / width, 0.0), 1.0)
            found.append(plain / ((1.0 - slowed) + slowed / self.factor))
        return found

    def _place(self, turns: float, base: float, head_dim: int) -> float:
        """Return which pair turns so often within the original context, not rounded."""
        ratio = self.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(base))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions rotate queries and keys."""

    base: float
    position_scale: float = 1.0
    """Positions are multiplied by this before rotating (linear scaling: 1 / factor)."""
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    interleaved: bool = False
    """Whether the pairs are neighbours rather than halves of the head."""

    @property
    def gain(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.gain

    def periods(self, head_dim: int) -> list[float] | None:
        """Return each pair's tokens per radian, or None where `base` alone says it."""
        if self.yarn is not None:
            return self.yarn.periods(self.base, head_dim)
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
    plain = RopeConfig(
        base=scaling.positive("rope_theta", default=base),
        interleaved=fields.flag("rope_traditional", default=False),
    )
    partial = scaling.positive("partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise scaling.error("partial_rotary_factor", f"{partial} is not supported, only 1")
    kind_key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.values.get(kind_key)
    if kind is None and scaling.has("factor"):
        raise fields.error(key, "has a factor but no rope_type")
    match kind:
        case None | "default":
            return plain
        case "linear":
            return replace(plain, position_scale=1.0 / scaling.positive("factor"))
        case "llama3":
            return replace(plain, llama3=_llama3(scaling))
        case "yarn":
            return replace(plain, yarn=_yarn(scaling, base=plain.base))
        case "dynamic":
            # It acts on positions beyond `max_position_embeddings`, which no row ever has.
            scaling.positive("factor")
            return plain
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


def _yarn(scaling: Fields, *, base: float) -> YarnScaling:
    factor = scaling.positive("factor")
    if factor < 1.0:
        raise scaling.error("factor", f"{factor} is below 1")
    if base <= 1.0:
        raise scaling.error("rope_theta", f"{base} is not above 1")
    fast = scaling.positive("beta_fast", default=BETA_FAST_DEFAULT)
    slow = scaling.positive("beta_slow", default=BETA_SLOW_DEFAULT)
    if fast < slow:
        raise scaling.error("beta_fast", f"{fast} is below beta_slow {slow}")
    return YarnScaling(
        factor=factor,
        original_context=scaling.integer(
            "original_max_position_embeddings", low=1, high=CONTEXT_LENGTH_LIMIT
        ),
        beta_fast=fast,
        beta_slow=slow,
        gain=_yarn_gain(scaling, factor),
        truncate=scaling.flag("truncate", default=True),
    )


def _yarn_gain(scaling: Fields, factor: float) -> float:
    """Return `attention_factor`, or what follows from the factor: by two weights where both are."""
    if scaling.has("attention_factor"):
        return scaling.positive("attention_factor")
    stated = [_weight_of_gain(scaling, key) for key in ("mscale", "mscale_all_dim")]
    over, under = stated if all(stated) else (1.0, 0.0)
    grown = math.log(factor) / 10
    return (1.0 + over * grown) / (1.0 + under * grown)


def _weight_of_gain(scaling: Fields, key: str) -> float:
    """Return a number from 0 up; 0 where the key is absent."""
    if scaling.values.get(key) in (None, 0):
        return 0.0
    return scaling.positive(key)
