"""Rotary position embedding: its kinds of scaling, and their wavelengths.

Invariants:
- Wavelengths are computed in double precision, once, on the host.
- They are the same for all rows that a model ever holds, whatever their lengths: a key that one row
  leaves behind may be another's.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol


class Scaling(Protocol):
    """How slow rotations are slowed, so that contexts may be longer than those of training."""

    @property
    def gain(self) -> float:
        """What rotated queries and keys are multiplied by."""

    def periods(self, base: float, head_dim: int) -> list[float]:
        """Return each pair's tokens per radian."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    gain: float = 1.0

    def periods(self, base: float, head_dim: int) -> list[float]:
        """Return each pair's tokens per radian."""
        plain = [base ** (pair / head_dim) for pair in range(0, head_dim, 2)]
        return [period * self.stretch(2 * math.pi * period) for period in plain]

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
    scaling: Scaling | None = None
    interleaved: bool = False
    """Whether the pairs are neighbours rather than halves of the head."""
    sections: tuple[int, int, int] | None = None
    """How many pairs, one after another, turn by a token's time, by its height and by its width,
    where these differ; None: all turn by its position."""
    mixed: bool = False
    """Whether the axes take turns pair by pair, as long as height and width have pairs left; what
    neither has is time's."""

    @property
    def axes(self) -> tuple[int, ...]:
        """Which axis each pair turns by: 0 time, 1 height, 2 width; without sections none."""
        counts = self.sections or ()
        if not self.mixed:
            return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
        turns = (pair % 3 for pair in range(sum(counts)))
        return tuple(axis if pair < 3 * counts[axis] else 0 for pair, axis in enumerate(turns))

    @property
    def gain(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.gain

    def periods(self, head_dim: int) -> list[float] | None:
        """Return each pair's tokens per radian, or None where `base` alone says it."""
        return None if self.scaling is None else self.scaling.periods(self.base, head_dim)

    def within(self, context: int) -> "RopeConfig":
        """Return how positions rotate where no row is ever longer than `context`."""
        if not isinstance(self.scaling, LongScaling):
            return self  # no other scaling depends on that
        return replace(self, scaling=replace(self.scaling, context=context))
