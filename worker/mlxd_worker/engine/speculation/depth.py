"""How deep to guess: what guesses are worth, what wider steps cost, and when to leave it. Pure.

Invariants:
- All rows of a pass have one width: the tokens a row takes in it, its guesses and one more. Rows
  that guess nothing share the pass of those that do, or take a plain one of their own in the same
  step. What is chosen gives most tokens a second, computed from measurements made here; width 1 is
  plain decoding, and is left only where the gain is more than noise.
- One stalled step neither starts guessing nor ends it where the difference is clear (`costs`).
- Where wider steps do not pay they are tried again, ever more seldom: costs change, and nobody
  tells. What tries are likely to lose is bounded by a share of the time.
- What is of no use in most steps is not computed in any: limits and likely gains are asked for only
  where the best that guesses can come to would pay.
- Nothing here is about one stream's content: a row brings how sure it is, by its own record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
CROWD_GAIN_MIN: Final = 1.4
"""The same from so many rows on: each token has its price there, less than this came to nothing as
measured, and rows that guess nothing wait longer for their tokens (decision 0041)."""

PATIENCE_STEPS: Final = 32
"""Steps in a row in which less pays, after which that is taken to be how things are."""

PROBE_INTERVAL_MIN: Final = 4
PROBE_INTERVAL_MAX: Final = 512
"""Steps between two tries of a width that does not pay; doubled by each that was of no use."""

SKIPPED_MAX: Final = 8
"""Steps between two in which rows look for guesses, while the best that they find would not pay."""

PROBE_SHARE: Final = 0.01
"""Of all time, what tries of such widths are likely to lose at most."""

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


@dataclass(frozen=True, slots=True)
class Limits:
    """The widest passes that a step's rows can take."""

    guessing: int
    """That those with offers can."""
    shared: int
    """That all can."""


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
        self._apart = 0
        """Steps between two looks for guesses."""
        self._skipped = 0
        self._credit_s = 0.0
        """What the next try may lose."""
        self._trying: tuple[int, float] | None = None
        """The width that was last chosen for its cost alone, and what that loses."""

    def looks(self, rows: int) -> bool:
        """Tell whether `rows` rows look for guesses in this step; asked once a step.

        In all while guesses may pay, and where few do. What is copied goes on for longer than what
        is skipped.
        """
        self._skipped += 1
        if self._skipped <= self._apart and rows >= CROWD_ROWS:
            return False
        self._skipped = 0
        self._apart = min(self._apart + 1, SKIPPED_MAX)
        return True

    def choose(self, rows: int, offers: Sequence[Offer], limits: Callable[[], Limits]) -> Choice:
        """Return how the next step of `rows` rows, some of which make `offers`, is run best.

        limits: asked only where a wider pass may be chosen. The caller runs what is chosen, or
        narrower, and tells `learn_pass` of each pass.
        """
        self._trying = None
        plain_s = self.costs.plain(rows)
        if plain_s is None:
            return PLAIN
        self._waited += 1
        if not self._may_pay(rows, offers, plain_s) and not self._is_due(1):
            self._note_best(1)
            return PLAIN
        most = limits()
        possible = self._possible(offers, max(most.guessing, most.shared))
        if len(possible) < 2:
            return PLAIN
        ways = [self._way(width, rows, len(offers), most) for width in possible]
        tokens = _likely_tokens(rows, offers, ways)
        best = _best(rows, tokens, ways)
        if best:
            self._apart = 0
        self._note_best(ways[best][0].width)
        return ways[self._probe(best, tokens, ways)][0]

    def learn_pass(self, rows: int, width: int, seconds: float) -> None:
        """Learn what a pass of `rows` rows and this width took."""
        self.costs.note(rows, width, seconds)
        self._credit_s += PROBE_SHARE * seconds
        if width in self._widths:
            self._reached = max(self._reached, self._widths.index(width))
        if self._trying is not None and self._trying[0] == width:
            self._credit_s -= self._trying[1]
            self._interval, self._waited = min(2 * self._interval, PROBE_INTERVAL_MAX), 0
            self._trying = None

    def _may_pay(self, rows: int, offers: Sequence[Offer], plain_s: float) -> bool:
        """Tell whether any width would pay, were all guesses right that follow a right one."""
        first = [(offer.depth, offer.record.rate(offer.agreed)) for offer in offers]
        least = _least_gain(rows) * rows / plain_s
        return any(
            rows + sum(min(depth, width - 1) * rate for depth, rate in first)
            > least * self._way(width, rows, len(offers), Limits(width, width))[1]
            for width in self._widths[1 : self._reached + 2]
        )

    def _note_best(self, width: int) -> None:
        """Note which width is best in this step, and what that makes of the one that pays."""
        if width > self._chosen or self._below >= PATIENCE_STEPS:
            self._chosen, self._below = width, 0
            self._interval, self._waited = PROBE_INTERVAL_MIN, 0
        self._below = self._below + 1 if width < self._chosen else 0

    def _possible(self, offers: Sequence[Offer], width_max: int) -> Sequence[int]:
        """Return the widths to consider: each is tried after the one before, none without need."""
        known = self._widths[: self._reached + 2]
        possible = [*takewhile(lambda width: width <= width_max, known)]
        deepest = max((offer.depth for offer in offers), default=0)
        enough = next((i for i, width in enumerate(possible) if width > deepest), len(possible))
        return possible[: enough + 1]

    def _way(self, width: int, rows: int, guessing: int, most: Limits) -> tuple[Choice, float]:
        """Return the faster way to run a width, and what it takes."""
        shared = apart = math.inf
        if width <= most.shared or width == 1:
            shared = self.costs.seconds(rows, width) or LEAST_S
        if 1 < width <= most.guessing and guessing < rows:
            plain, wide = self.costs.plain(rows - guessing), self.costs.seconds(guessing, width)
            apart = (plain or LEAST_S) + (wide or LEAST_S)
        return Choice(width, apart=apart < shared), min(shared, apart)

    def _is_due(self, width: int) -> bool:
        """Tell whether the width after this one, now the best, is to be tried if it may lose so."""
        return width >= self._chosen and self._waited >= self._interval

    def _probe(
        self, best: int, tokens: Sequence[float], ways: Sequence[tuple[Choice, float]]
    ) -> int:
        """Return `best`, or now and then the next wider one, so that its cost stays known."""
        choice, best_s = ways[best]
        if best + 1 == len(ways) or not self._is_due(choice.width):
            return best
        wider, wider_s = ways[best + 1]
        loss_s = wider_s - tokens[best + 1] * best_s / tokens[best]
        if loss_s > self._credit_s:
            return best
        self._trying = wider.width, max(loss_s, 0.0)
        return best + 1


def _least_gain(rows: int) -> float:
    return CROWD_GAIN_MIN if rows >= CROWD_ROWS else GAIN_MIN


def _likely_tokens(
    rows: int, offers: Sequence[Offer], ways: Sequence[tuple[Choice, float]]
) -> list[float]:
    """Return how many tokens each of `ways`, the plain one first, is likely to give."""
    deepest = ways[-1][0].width - 1
    gains = [offer.record.gains(offer.agreed, min(offer.depth, deepest)) for offer in offers]
    return [
        rows + sum(gain[min(choice.width - 1, len(gain)) - 1] for gain in gains if choice.width > 1)
        for choice, _ in ways
    ]


def _best(rows: int, tokens: Sequence[float], ways: Sequence[tuple[Choice, float]]) -> int:
    """Return which of `ways`, the plain one first, gives most tokens a second."""
    least = _least_gain(rows)
    rates = [count / seconds for count, (_, seconds) in zip(tokens, ways, strict=True)]
    best = 0
    for index, rate in enumerate(rates):
        if rate > rates[best] * least:
            best = index
    return best
