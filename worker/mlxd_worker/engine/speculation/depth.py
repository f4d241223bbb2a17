"""How deep to guess: what guesses are worth, what wider steps cost, and when to leave it. Pure.

Invariants:
- All rows of a step have one width: the tokens a row takes in it, its guesses and one more. The
  width chosen is the one that gives most tokens a second, reckoned from what was measured here;
  width 1 is plain decoding, and is left only where the gain is more than noise.
- Time comes in as seconds measured by the caller. One stalled step moves an estimate by 7.5 % at
  most, so it neither starts guessing nor ends it where the difference is clear.
- Where wider steps do not pay they are tried again, ever more seldom: costs change, and nobody
  tells.
- Nothing here is about one stream's content: a row brings how sure it is, by its own record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

WIDTHS: Final = (1, 2, 4, 8, 16)
"""Tokens a row in one step: few, so that each width's cost is soon known and kept known."""

RATE_DEFAULT: Final = 0.5
"""How often a guess is taken to be right before anything was seen."""

PRIOR_SAMPLES: Final = 4.0
"""How many samples what is known from elsewhere counts for."""

RECORD_DECAY: Final = 0.9
"""Of one stream's samples by each later one; those of all streams are forgotten more slowly."""

POOLED_DECAY: Final = 0.98

COST_WEIGHT: Final = 0.3
"""Of a new measurement."""

INNOVATION_MAX: Final = 0.25
"""A measurement further off than this part of the estimate counts as so far off."""

SEEDING_SAMPLES: Final = 3
"""Measurements of which the least is taken: the first step of a kind is often slow."""

GAIN_MIN: Final = 1.05
"""Tokens a second, against a narrower step, below which a wider one is not worth it."""

PATIENCE_STEPS: Final = 32
"""Steps in a row in which less pays, after which that is taken to be how things are."""

LEAST_S: Final = 1e-9
"""What a step takes at least, whatever the clock says."""

PROBE_INTERVAL_MIN: Final = 4
PROBE_INTERVAL_MAX: Final = 512
"""Steps between two tries of a width that does not pay; doubled by each that was of no use."""

DEEPEST: Final = 32
"""Agreement beyond this is counted with it."""


class Record:
    """How often guesses were right, by how many tokens had agreed before them."""

    def __init__(self, *, pooled: Record | None = None) -> None:
        """Start from what `pooled` knows, which learns along; None: start from nothing."""
        self._pooled = pooled
        self._decay = POOLED_DECAY if pooled is None else RECORD_DECAY
        self._right = [0.0] * (DEEPEST + 1)
        self._seen = [0.0] * (DEEPEST + 1)

    def note(self, agreed: int, *, judged: int, right: int) -> None:
        """Learn that of `judged` guesses after `agreed` tokens the first `right` were right.

        A guess after a wrong one tells nothing and is not counted.
        """
        for step in range(min(judged, right + 1)):
            level = min(agreed + step, DEEPEST)
            self._right[level] = self._right[level] * self._decay + (step < right)
            self._seen[level] = self._seen[level] * self._decay + 1.0
        if self._pooled is not None:
            self._pooled.note(agreed, judged=judged, right=right)

    def rate(self, agreed: int) -> float:
        """Return how likely a guess after `agreed` tokens is right."""
        level = min(agreed, DEEPEST)
        seen = self._seen[level]
        return (self._right[level] + PRIOR_SAMPLES * self._prior(level)) / (seen + PRIOR_SAMPLES)

    def gains(self, agreed: int, depth: int) -> list[float]:
        """Return how many guesses are likely to be accepted of 1, of 2, ... of `depth`."""
        total, all_right = 0.0, 1.0
        gains = []
        for step in range(depth):
            all_right *= self.rate(agreed + step)
            total += all_right
            gains.append(total)
        return gains

    def _prior(self, level: int) -> float:
        if self._pooled is not None:
            return self._pooled.rate(level)
        # More agreement is never a worse sign: what is not known is taken from the level below.
        lower = next((below for below in range(level - 1, -1, -1) if self._seen[below]), None)
        if lower is None:
            return RATE_DEFAULT
        return self._right[lower] / self._seen[lower]


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

    def measured(self, rows: int, width: int) -> float | None:
        """Return what such a step takes, or None where none was measured."""
        return self._seconds.get((coarse(rows), width))

    def seconds(self, rows: int, width: int) -> float | None:
        """Return what such a step takes, as far as is known; None before the first plain one.

        A width that was never tried with so many rows is taken to cost as much more than a plain
        step as it did with the nearest number of rows. One that was never tried at all goes on as
        the two before it, or as a plain step: it is tried as soon as that could pay.
        """
        known = self.measured(rows, width)
        plain = self.measured(rows, 1)
        if known is not None or plain is None:
            return known
        near = min(
            (key for key in self._seconds if key[1] == width and (key[0], 1) in self._seconds),
            key=lambda key: abs(key[0] - rows),
            default=None,
        )
        if near is not None:
            return plain * self._seconds[near] / self._seconds[near[0], 1]
        narrower = sorted(
            wide for counted, wide in self._seconds if counted == coarse(rows) and wide < width
        )
        if len(narrower) < 2:
            return plain
        (first, last) = narrower[-2:]
        before, at = self._seconds[coarse(rows), first], self._seconds[coarse(rows), last]
        return at + max(at - before, 0.0) * (width - last) / (last - first)


def coarse(rows: int) -> int:
    """Return a number of rows to three binary digits, rounded up: costs hardly differ within."""
    unit = 1 << max(rows.bit_length() - 3, 0)
    return -(-rows // unit) * unit


@dataclass(frozen=True, slots=True)
class Offer:
    """What one row could guess in a step."""

    depth: int
    """Guesses that it has, at most; more than 0."""
    agreed: int
    record: Record


class DepthController:
    """Chooses a step's width. One owner: the engine thread."""

    def __init__(self, *, widths: Sequence[int] = WIDTHS) -> None:
        """Choose among `widths`, ascending from 1."""
        assert widths[0] == 1, "plain decoding is always possible"
        self.costs = StepCosts()
        self._widths = tuple(widths)
        self._reached = 0
        """The greatest width run so far is `_widths[_reached]`."""
        self._chosen = 1
        """What pays at present, apart from steps in which there is less to guess."""
        self._below = 0
        """Steps in a row in which less than that was best."""
        self._interval = PROBE_INTERVAL_MIN
        self._waited = 0

    def choose(self, rows: int, offers: Sequence[Offer], *, width_max: int) -> int:
        """Return how wide the next step of `rows` rows is best, at most `width_max`.

        The caller runs it, so or narrower, and tells `ran`.
        """
        possible = self._possible(offers, width_max)
        if len(possible) < 2 or self.costs.measured(rows, 1) is None:
            return 1
        best = self._best(rows, offers, possible)
        if best > self._chosen or self._below >= PATIENCE_STEPS:
            self._chosen, self._below = best, 0
            self._interval, self._waited = PROBE_INTERVAL_MIN, 0
        if best < self._chosen:
            self._below += 1
            return best
        self._below = 0
        return self._probed(best, possible)

    def ran(self, rows: int, width: int, seconds: float) -> None:
        """Learn what a step of `rows` rows and this width took."""
        self.costs.note(rows, width, seconds)
        if width in self._widths:
            self._reached = max(self._reached, self._widths.index(width))

    def _possible(self, offers: Sequence[Offer], width_max: int) -> Sequence[int]:
        """Return the widths to consider: each is tried after the one before, none without need."""
        known = self._widths[: self._reached + 2]
        possible = [*takewhile(lambda width: width <= width_max, known)]
        deepest = max((offer.depth for offer in offers), default=0)
        enough = next((i for i, width in enumerate(possible) if width > deepest), len(possible))
        return possible[: enough + 1]

    def _best(self, rows: int, offers: Sequence[Offer], possible: Sequence[int]) -> int:
        costs = [self.costs.seconds(rows, width) or LEAST_S for width in possible]
        plain_rate = rows / costs[0]
        # What every guess being right would give is known at once, and mostly not enough.
        if not any(
            rows + sum(min(offer.depth, width - 1) for offer in offers)
            > plain_rate * GAIN_MIN * cost
            for width, cost in zip(possible[1:], costs[1:], strict=True)
        ):
            return 1
        gains = [
            offer.record.gains(offer.agreed, min(offer.depth, possible[-1] - 1)) for offer in offers
        ]
        best, best_rate = 1, plain_rate
        for width, cost in zip(possible[1:], costs[1:], strict=True):
            gained = sum(gain[min(width - 1, len(gain)) - 1] for gain in gains)
            rate = (rows + gained) / cost
            if rate > best_rate * GAIN_MIN:
                best, best_rate = width, rate
        return best

    def _probed(self, best: int, possible: Sequence[int]) -> int:
        """Return `best`, or now and then the next wider width, so that its cost stays known."""
        wider = next((width for width in possible if width > best), None)
        if wider is None:
            return best
        self._waited += 1
        if self._waited < self._interval:
            return best
        self._waited = 0
        self._interval = min(2 * self._interval, PROBE_INTERVAL_MAX)
        return wider
