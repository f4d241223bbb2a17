"""YaRN's scaling of rotations."""

import math
from dataclasses import dataclass

_BLEND_MIN = 0.001
"""How wide a blend is, in pairs, that begins where it ends."""


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
        periods = []
        for pair in range(head_dim // 2):
            plain = base ** (2 * pair / head_dim)
            slowed = min(max((pair - low) / width, 0.0), 1.0)
            periods.append(plain / ((1.0 - slowed) + slowed / self.factor))
        return periods

    def _place(self, turns: float, base: float, head_dim: int) -> float:
        """Return which pair turns so often within the original context, not rounded."""
        ratio = self.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(base))
