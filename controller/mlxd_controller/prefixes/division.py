"""Who may keep how much of prompts on disk, of one budget for all models. Pure.

Every model in one form has a folder. Of those with a worker the worker writes and removes files,
within the share that it was given; all others are idle, and the controller removes what has to go.

Invariants:
- What a worker may take counts as taken: the larger of its share and of what it has. All that,
  and what is in idle folders, is within the budget after each round; where it was not before (a
  smaller budget, workers of a former controller), no share grows until it is.
- A share grows only out of what is free now. What one worker has to give up for another one is
  ordered in this round and given in a later one, when it has been given up.
- What is worth least goes first, a step from each at most: seconds that a byte saves in a second,
  by the workers' own words, by files' times for idle folders. It goes only for what is worth more
  by RATIO_MIN, so that two of equal worth do not take from each other by turns.
- Room that a worker has and does not use is taken before anything that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

RATIO_MIN = 1.25
STEPS_OF_BUDGET = 64
"""A step is this part of the budget,"""
STEP_BLOCKS_MIN = 4
"""and at least so many blocks of the model."""
FIT_TURNS = 4
"""What is beyond a budget that became smaller goes in about so many parts."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker's folder."""

    form: str
    nbytes: int
    share_nbytes: int
    """In force, as far as the worker has said."""
    least_worth: float
    """Of what would go first there."""
    block_nbytes: int = 0
    """The most that one block takes."""
    evicts: bool = False
    """Whether it had to remove files since it was looked at last."""
    is_limited: bool = False
    """Whether its disk has no room for more than its share: it is given none."""

    @property
    def taken_nbytes(self) -> int:
        """What counts as taken."""
        return max(self.nbytes, self.share_nbytes)


@dataclass(frozen=True, slots=True)
class Idle:
    """A folder without a worker."""

    form: str
    nbytes: int
    least_worth: float


@dataclass(frozen=True, slots=True)
class Division:
    """What is to change: new shares of workers, and what idle folders may keep; by form."""

    shares: dict[str, int] = field(default_factory=dict)
    keep: dict[str, int] = field(default_factory=dict)


def step_nbytes(budget_nbytes: int, holder: Holder) -> int:
    """Return by how much a share grows at once."""
    least = max(budget_nbytes // STEPS_OF_BUDGET, STEP_BLOCKS_MIN * holder.block_nbytes, 1)
    return min(least, budget_nbytes)


def divide(budget_nbytes: int, holders: Sequence[Holder], idle: Sequence[Idle]) -> Division:
    """Return what changes in this round, of a budget of 0 or more bytes."""
    round_ = _Round(budget_nbytes, holders, idle)
    if round_.free_nbytes < 0:
        round_.fit()
    else:
        round_.grow()
    shares = {
        holder.form: share
        for holder in holders
        if (share := round_.shares[holder.form]) != holder.share_nbytes
    }
    keep = {one.form: kept for one in idle if (kept := round_.keep[one.form]) < one.nbytes}
    return Division(shares, keep)


class _Round:
    """One round, as far as it has come."""

    def __init__(self, budget_nbytes: int, holders: Sequence[Holder], idle: Sequence[Idle]) -> None:
        self._budget_nbytes = budget_nbytes
        self._holders = holders
        self._idle = idle
        self.shares = {holder.form: holder.share_nbytes for holder in holders}
        self.keep = {one.form: one.nbytes for one in idle}
        taken = sum(holder.taken_nbytes for holder in holders) + sum(one.nbytes for one in idle)
        self.free_nbytes = budget_nbytes - taken

    def fit(self) -> None:
        """Have what is beyond the budget go, the least worth first, a part from each by turns.

        What a worker has beyond its share is about to go anyway.
        """
        lacking = sum(self.shares.values()) + sum(self.keep.values()) - self._budget_nbytes
        lacking -= self._take_unused(max(lacking, 0), spared=0)
        while lacking > 0:
            taken = 0
            part = -(-lacking // FIT_TURNS)
            for form, _ in self._by_worth():
                step = min(max(self._step(form), part), lacking - taken)
                taken += self._take(form, step)
            assert taken, "what is there is all that can be beyond"
            lacking -= taken

    def grow(self) -> None:
        """Give those who are full what is free, and have others give up what is worth less."""
        full = [holder for holder in self._holders if self._is_full(holder)]
        full.sort(key=lambda holder: (-holder.least_worth, holder.form))
        unmet: list[tuple[Holder, int]] = []
        for holder in full:
            wanted = step_nbytes(self._budget_nbytes, holder)
            grant = min(wanted, self.free_nbytes)
            self.shares[holder.form] = holder.share_nbytes + grant
            self.free_nbytes -= grant
            if grant < wanted:
                unmet.append((holder, wanted - grant))
        spared = {holder.form for holder in full}
        for holder, lacking in unmet:
            left = lacking - self._take_unused(lacking, spared=1)
            self._take_worth_less(holder, left, spared)

    def _is_full(self, holder: Holder) -> bool:
        if holder.is_limited:
            return False
        step = step_nbytes(self._budget_nbytes, holder)
        return holder.evicts or 2 * (holder.share_nbytes - holder.nbytes) < step

    def _take_unused(self, nbytes: int, *, spared: int) -> int:
        """Take room that nobody uses, but for so many steps each; return how much that was."""
        taken = 0
        for holder in self._holders:
            share = self.shares[holder.form]
            left = spared * step_nbytes(self._budget_nbytes, holder)
            unused = share - holder.nbytes - left
            if share == holder.share_nbytes and unused > 0 and taken < nbytes:
                gone = min(unused, nbytes - taken)
                self.shares[holder.form] = share - gone
                taken += gone
        return taken

    def _take_worth_less(self, wanting: Holder, nbytes: int, spared: set[str]) -> None:
        for form, worth in self._by_worth():
            if nbytes <= 0 or worth * RATIO_MIN > wanting.least_worth:
                return
            is_own = form == wanting.form
            grown = form in spared and self.shares[form] != self._holder(form).share_nbytes
            if not is_own and not grown:
                nbytes -= self._take(form, min(self._step(form), nbytes))

    def _by_worth(self) -> list[tuple[str, float]]:
        """Return who has something to give up, the least worth first."""
        have = [(one.form, one.least_worth) for one in self._idle if self.keep[one.form]]
        have += [(h.form, h.least_worth) for h in self._holders if h.nbytes]
        return sorted(have, key=lambda pair: (pair[1], pair[0]))

    def _take(self, form: str, nbytes: int) -> int:
        """Have a folder give up what is there, so many bytes at most; return how many."""
        if form in self.keep:
            gone = min(nbytes, self.keep[form])
            self.keep[form] -= gone
            return gone
        holder = self._holder(form)
        kept = min(self.shares[form], holder.nbytes)
        gone = min(nbytes, kept)
        self.shares[form] = kept - gone
        return gone

    def _step(self, form: str) -> int:
        if form in self.keep:
            return max(self._budget_nbytes // STEPS_OF_BUDGET, 1)
        return step_nbytes(self._budget_nbytes, self._holder(form))

    def _holder(self, form: str) -> Holder:
        return next(holder for holder in self._holders if holder.form == form)
