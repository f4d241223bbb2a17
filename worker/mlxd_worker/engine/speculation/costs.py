"""What steps take, by their rows and width, as measured. Pure.

Invariants:
- Time comes in as seconds measured by the caller. One stalled step moves an estimate by 7.5 % at
  most.
- What was not measured is estimated from what was, or assumed cheap, so that it is tried.
"""

from __future__ import annotations

from typing import Final

COST_WEIGHT: Final = 0.3
"""Of a new measurement."""

INNOVATION_MAX: Final = 0.25
"""A measurement further off than this part of the estimate counts as so far off."""

SEEDING_SAMPLES: Final = 3
"""Measurements of which the least is taken: the first step of a kind is often slow."""

LEAST_S: Final = 1e-9
"""What a step takes at least, whatever the clock says."""


class StepCosts:
    """Seconds of a step by its rows and width, as measured; rows are counted in coarse numbers."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        self._seeds: dict[tuple[int, int], int] = {}

    def note(self, rows: int, width: int, seconds: float) -> None:
        """Take a measurement."""
        seconds = max(seconds, LEAST_S)
        key = (coarse(rows), width)
        known = self._seconds.get(key)
        seeds = self._seeds.get(key, 0)
        if known is None or seeds < SEEDING_SAMPLES:
            self._seeds[key] = seeds + 1
            self._seconds[key] = seconds if known is None else min(known, seconds)
            return
        most = known * INNOVATION_MAX
        self._seconds[key] = known + COST_WEIGHT * max(-most, min(seconds - known, most))

    def time_of(self, rows: int, width: int) -> float | None:
        """Return what such a step takes, or None where none was measured."""
        return self._seconds.get((coarse(rows), width))

    def plain(self, rows: int) -> float | None:
        """Return what a plain step takes, by those measured with fewer rows and with more.

        None before the first. Half of a step is taken not to depend on its rows where only one
        number of rows, or none as small or as large, was measured.
        """
        known = self.time_of(rows, 1)
        if known is not None:
            return known
        counts = sorted(count for count, width in self._seconds if width == 1)
        fewer = [count for count in counts if count < rows][-1:]
        more = [count for count in counts if count > rows][:1]
        if not fewer or not more:
            return next(
                (self._seconds[count, 1] * (1 + rows / count) / 2 for count in (*fewer, *more)),
                None,
            )
        (low,), (high,) = fewer, more
        part = (rows - low) / (high - low)
        return self._seconds[low, 1] * (1 - part) + self._seconds[high, 1] * part

    def seconds(self, rows: int, width: int) -> float | None:
        """Return what such a pass takes, as far as is known; None before the first plain one.

        A width that was never tried with so many rows is taken to cost as much more than a plain
        step as it did with the nearest number of rows. One that was never tried at all goes on as
        the two before it; else each token more costs what it did in the wide pass most like it.
        Before the first wide pass it is a plain step: it is tried as soon as that could pay.
        """
        known = self.time_of(rows, width)
        plain = self.plain(rows)
        if known is not None or plain is None:
            return known
        near = min(
            (count for count, wide in self._seconds if wide == width),
            key=lambda count: abs(count - rows),
            default=None,
        )
        if near is not None:
            return plain * self._seconds[near, width] / (self.plain(near) or plain)
        narrower = sorted(
            wide for count, wide in self._seconds if count == coarse(rows) and wide < width
        )
        if len(narrower) < 2:
            return plain + self._token_s(rows) * rows * (width - 1)
        (first, last) = narrower[-2:]
        before, at = self._seconds[coarse(rows), first], self._seconds[coarse(rows), last]
        return at + max(at - before, 0.0) * (width - last) / (last - first)

    def _token_s(self, rows: int) -> float:
        """Return what a token more a row took in the wide pass of the nearest number of rows."""
        wide = [key for key in self._seconds if key[1] > 1]
        if not wide:
            return 0.0
        count, width = min(wide, key=lambda key: (abs(key[0] - rows), -key[1]))
        more_s = self._seconds[count, width] - (self.plain(count) or 0.0)
        return max(more_s, 0.0) / (count * (width - 1))


def coarse(rows: int) -> int:
    """Return a number of rows to three binary digits, rounded up: costs hardly differ within."""
    unit = 1 << max(rows.bit_length() - 3, 0)
    return -(-rows // unit) * unit
