"""How deep to guess: what guesses are worth, what wider steps cost, and when to leave it. Pure.

Invariants:
- All rows of a pass have one width: the tokens a row takes in it, its guesses and one more. Rows
  that guess nothing share the pass of those that do, or take a plain one of their own in the same
  step. What is chosen gives most tokens a second, computed from measurements made here; width 1 is
  plain decoding, and is left only where the gain is more than noise.
- One stalled step neither starts guessing nor ends it where the difference is clear (`costs`).
- Where wider steps do not pay they are tried again, ever more seldom: costs change, and nobody
  tells.
- Nothing here is about one stream's content: a row brings how sure it is, by its own record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from mlxd_worker.engine.speculation.costs import LEAST_S, StepCosts

WIDTHS: Final = (1, 2, 4, 8, 16)
"""Tokens a row in one step: few, so that each width's cost is soon known and kept known."""

RATE_DEFAULT: Final = 0.5
"""How often a guess is taken to be right before anything was seen."""

PRIOR_SAMPLES: Final = 4.0
"""How many samples what is known from elsewhere counts for."""

RECORD_DECAY: Final = 0.9
"""Of one stream's samples by each later one; those of all streams are forgotten more slowly."""

POOLED_DECAY: Final = 0.98

GAIN_MIN: Final = 1.1
"""Tokens a second, against a narrower step, below which a wider one is not worth it."""

CROWD_ROWS: Final = 12
CROWD_GAIN_MIN: Final = 1.3
"""The same from so many rows on: each token has its price there, less than this came to nothing as
measured, and rows that guess nothing wait longer for their tokens (decision 0041)."""

PATIENCE_STEPS: Final = 32
"""Steps in a row in which less pays, after which that is taken to be how things are."""

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


@dataclass(frozen=True, slots=True)
class Offer:
    """What one row could guess in a step."""

    depth: int
    """Guesses that it has, at most; more than 0."""
    agreed: int
    record: Record


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step is run."""

    width: int = 1
    apart: bool = False
    """Whether the rows that guess nothing take a plain pass of their own."""


PLAIN: Final = Choice()


class DepthController:
    """Chooses how steps are run. One owner: the engine thread."""

    def __init__(self, *, widths: Sequence[int] = WIDTHS) -> None:
        """Choose among `widths`, ascending from 1."""
        assert widths[0] == 1, "plain decoding is always possible"
        self.costs = StepCosts()
        self._widths = tuple(widths)
        self._reached = 0
        """The greatest width run so far is `_widths[_reached]`."""
        self._chosen = 1
        """The width that pays at present, apart from steps in which there is less to guess."""
        self._below = 0
        """Steps in a row in which less than that was best."""
        self._interval = PROBE_INTERVAL_MIN
        self._waited = 0

    def choose(
        self, rows: int, offers: Sequence[Offer], *, width_max: int, shared_max: int
    ) -> Choice:
        """Return how the next step of `rows` rows, some of which make `offers`, is run best.

        width_max: the widest pass that the rows with offers can take; shared_max: that all can. The
        caller runs it, so or narrower, and tells `learn_pass` of each pass.
        """
        possible = self._possible(offers, max(width_max, shared_max))
        if len(possible) < 2 or self.costs.time_of(rows, 1) is None:
            return PLAIN
        ways = [
            self._way(width, rows, len(offers), width_max=width_max, shared_max=shared_max)
            for width in possible
        ]
        best = self._best(rows, offers, ways)
        width = ways[best][0].width
        if width > self._chosen or self._below >= PATIENCE_STEPS:
            self._chosen, self._below = width, 0
            self._interval, self._waited = PROBE_INTERVAL_MIN, 0
        if width < self._chosen:
            self._below += 1
            return ways[best][0]
        self._below = 0
        return ways[self._probe(best, len(ways))][0]

    def learn_pass(self, rows: int, width: int, seconds: float) -> None:
        """Learn what a pass of `rows` rows and this width took."""
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

    def _way(
        self, width: int, rows: int, guessing: int, *, width_max: int, shared_max: int
    ) -> tuple[Choice, float]:
        """Return the faster way to run a width, and what it takes."""
        shared = apart = math.inf
        if width <= shared_max or width == 1:
            shared = self.costs.seconds(rows, width) or LEAST_S
        if 1 < width <= width_max and guessing < rows:
            plain, wide = self.costs.plain(rows - guessing), self.costs.seconds(guessing, width)
            apart = (plain or LEAST_S) + (wide or LEAST_S)
        return Choice(width, apart=apart < shared), min(shared, apart)

    def _best(
        self, rows: int, offers: Sequence[Offer], ways: Sequence[tuple[Choice, float]]
    ) -> int:
        """Return which of `ways`, the plain one first, gives most tokens a second."""
        plain_rate = rows / ways[0][1]
        least = CROWD_GAIN_MIN if rows >= CROWD_ROWS else GAIN_MIN
        # What every guess being right would give is known at once, and mostly not enough.
        if not any(
            rows + sum(min(offer.depth, choice.width - 1) for offer in offers)
            > plain_rate * least * cost
            for choice, cost in ways[1:]
        ):
            return 0
        deepest = ways[-1][0].width - 1
        gains = [offer.record.gains(offer.agreed, min(offer.depth, deepest)) for offer in offers]
        best, best_rate = 0, plain_rate
        for index, (choice, cost) in enumerate(ways[1:], start=1):
            gained = sum(gain[min(choice.width - 1, len(gain)) - 1] for gain in gains)
            rate = (rows + gained) / cost
            if rate > best_rate * least:
                best, best_rate = index, rate
        return best

    def _probe(self, best: int, ways: int) -> int:
        """Return `best`, or now and then the next wider one, so that its cost stays known."""
        if best + 1 == ways:
            return best
        self._waited += 1
        if self._waited < self._interval:
            return best
        self._waited = 0
        self._interval = min(2 * self._interval, PROBE_INTERVAL_MAX)
        return best + 1
