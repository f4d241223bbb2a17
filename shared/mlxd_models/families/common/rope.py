"""Rotary position embedding: its kinds of scaling, and their wavelengths.

Invariants:
- Wavelengths are computed in double precision, once, on the host.
- They are the same for all rows that a model ever holds, whatever their lengths: a key that one row
  leaves behind may be another's.
"""

import math
from dataclasses import dataclass, replace

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
class LongScaling:
    """Each pair is slowed by a factor of its own: one list for short contexts, one for long."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    """The longest context that is a short one."""
    gain: float
    """Queries and keys are multiplied by this, whatever the context."""
    context: int
    """How long rows may become: this decides for all of them."""

    def periods(self, base: float, head_dim: int) -> list[float]:
        """Return each pair's tokens per radian."""
        factors = self.long if self.context > self.original_context else self.short
        assert len(factors) == head_dim // 2, "a parsed config has one for each pair"
        return [factor * base ** (2 * pair / head_dim) for pair, factor in enumerate(factors)]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions rotate queries and keys."""

    base: float
    position_scale: float = 1.0
    """Positions are multiplied by this before rotating (linear scaling: 1 / factor)."""
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    long: LongScaling | None = None
    interleaved: bool = False
    """Whether the pairs are neighbours rather than halves of the head."""

    @property
    def gain(self) -> float:
        """What rotated queries and keys are multiplied by."""
        scaling = self.yarn or self.long
        return 1.0 if scaling is None else scaling.gain

    def periods(self, head_dim: int) -> list[float] | None:
        """Return each pair's tokens per radian, or None where `base` alone says it."""
        scaling = self.yarn or self.long
        if scaling is not None:
            return scaling.periods(self.base, head_dim)
        if self.llama3 is None:
            return None
        plain = [self.base ** (pair / head_dim) for pair in range(0, head_dim, 2)]
        return [period * self.llama3.stretch(2 * math.pi * period) for period in plain]

    def within(self, context: int) -> "RopeConfig":
        """Return how positions rotate where no row is ever longer than `context`."""
        if self.long is None:
            return self
        return replace(self, long=replace(self.long, context=context))
