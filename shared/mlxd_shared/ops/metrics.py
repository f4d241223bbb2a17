"""Counters, gauges and histograms that a status can carry; `wire.convert_status` writes them.

One owner writes (the event loop's task, or the engine thread with its own registry); a reader
gets a copy. Counters and histograms only go up between two starts of the process.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
SECONDS_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip


def labels(**values: str) -> Labels:
    """Return a label set in one canonical order."""
    return tuple(sorted(values.items()))


@dataclass(slots=True)
class Counter:
    """A family of sums that never go down."""

    name: str
    help: str
    points: dict[Labels, float] = field(default_factory=dict)

    def add(self, amount: float = 1.0, /, **values: str) -> None:
        """Add `amount`, at least 0, to the point with these labels."""
        assert amount >= 0, (self.name, amount)
        key = labels(**values)
        self.points[key] = self.points.get(key, 0.0) + amount


@dataclass(slots=True)
class Histogram:
    """A family of distributions over fixed upper bounds."""

    name: str
    help: str
    bounds: tuple[float, ...] = SECONDS_BOUNDS
    counts: dict[Labels, list[int]] = field(default_factory=dict)
    sums: dict[Labels, float] = field(default_factory=dict)

    def observe(self, value: float, /, *, times: int = 1, **values: str) -> None:
        """Count `value` `times` times under these labels."""
        key = labels(**values)
        counts = self.counts.setdefault(key, [0] * (len(self.bounds) + 1))
        counts[bisect.bisect_left(self.bounds, value)] += times
        self.sums[key] = self.sums.get(key, 0.0) + value * times


Gauges = Mapping[Labels, float]
