"""What loads were measured to take, in place of what was reckoned. Pure.

Invariants:
- Figures hold for one model and one way to live: the form of its weights, context, rows, the form
  of keys and values, and how many ranks share it. Of another way nothing is known.
- They replace what cannot grow: weights, the process. Keys and values that are not used yet, and
  snapshots, stay promised; activations are never less than reckoned.
- Of figures of one way the largest count: a worker that was measured later had done more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxd_models.fit.plan import Choice

KNOWN_MAX = 8
"""Ways to live that are remembered of one model."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a worker takes, in bytes."""

    weights: int
    """The arrays that it keeps for good."""
    peak: int
    """The most that its arrays have ever taken."""
    process: int = 0
    """What its process takes besides arrays; 0 if unknown."""

    def over(self, reckoned: Mapping[str, int]) -> dict[str, int]:
        """Return the terms, by name, that these figures replace."""
        promised = reckoned.get("kv", 0) + reckoned.get("prefix", 0)
        figures = {"weights": self.weights}
        if self.peak - self.weights - promised > reckoned.get("activations", 0):
            figures["activations"] = self.peak - self.weights - promised
        if self.process:
            figures["process"] = self.process
        return figures


@dataclass(frozen=True, slots=True)
class Known:
    """Figures, and the way that they are of."""

    way: Choice
    figures: Figures


def recall(known: tuple[Known, ...], way: Choice) -> Figures | None:
    """Return what is known of one way to live."""
    return next((each.figures for each in known if each.way == way), None)


def learn(known: tuple[Known, ...], way: Choice, figures: Figures) -> tuple[Known, ...]:
    """Return what is known after one more measurement; the oldest is forgotten for it."""
    former = recall(known, way) or figures
    largest = Figures(
        weights=figures.weights,
        peak=max(former.peak, figures.peak),
        process=max(former.process, figures.process),
    )
    others = tuple(each for each in known if each.way != way)
    return (*others, Known(way, largest))[-KNOWN_MAX:]
