"""Which idle models go to make room: the cheapest sufficient set, by one pure function.

Invariants:
- Only offered victims are chosen: the caller leaves out leased, loading, pinned and young ones.
- A model goes only where those of lower priority do not suffice, even all together.
- Up to VICTIMS_SEARCHED_MAX candidates the set is the cheapest there is; beyond, the cheapest
  found among the best that many. No member is superfluous. Equal offers give equal choices.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from mlxd_shared import config

Rank: TypeAlias = tuple[float, int, float, tuple[str, ...]]
Amounts: TypeAlias = tuple[int, ...]
"""Bytes and places in turn, of one device after the other."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A model that may be evicted: ready, idle, not pinned, not too young."""

    digest: str
    nbytes: int
    last_used_s: float
    cost: float = 0.0
    """What its absence is expected to cost, at least 0: reload seconds by chance of reuse."""
    priority: int = 0
    """Higher stays longer."""
    places: int = 1
    """How many places it leaves on the device in question: 0 where it lives elsewhere."""
    beyond: tuple[tuple[int, int], ...] = ()
    """Bytes and places that it leaves on further devices, where all of a group are in question."""

    @property
    def frees(self) -> Amounts:
        """What it leaves, bytes and places, device by device."""
        return _flatten(self.nbytes, self.places, self.beyond)


def _flatten(nbytes: int, places: int, beyond: tuple[tuple[int, int], ...]) -> Amounts:
    return (nbytes, places, *(amount for pair in beyond for amount in pair))


@dataclass(frozen=True, slots=True)
class Lack:
    """What is to be had: models, and bytes and places of each device in question."""

    amounts: Amounts
    slots: int

    def is_met(self, amounts: Amounts, slots: int) -> bool:
        """Return whether so much is enough."""
        return slots >= self.slots and not any(map(operator.lt, amounts, self.amounts))

    def is_met_by(self, victims: Collection[Victim]) -> bool:
        """Return whether nothing is lacking when these have gone."""
        return self.is_met(self.sum_of(victims), len(victims))

    def sum_of(self, victims: Collection[Victim]) -> Amounts:
        """Return what these leave together."""
        if not victims:
            return (0,) * len(self.amounts)
        return tuple(map(sum, zip(*(victim.frees for victim in victims), strict=True)))


def dearness(chosen: tuple[Victim, ...]) -> tuple[int, Rank]:
    """Return by what sets of different devices are compared: the highest priority, then the cost.

    Among equally dear ones the smaller goes, and so on as in `choose`.
    """
    return max((victim.priority for victim in chosen), default=0), _rank(chosen)


def choose(
    victims: tuple[Victim, ...],
    *,
    shortfall_bytes: int,
    shortfall_slots: int,
    shortfall_places: int = 0,
    shortfall_beyond: tuple[tuple[int, int], ...] = (),
) -> tuple[Victim, ...] | None:
    """Return the cheapest sufficient set, or None where all together are too few.

    shortfall_beyond: bytes and places of further devices, in the order of the victims' `beyond`.
    Among equally cheap sets the smaller goes, then the one that was used longest ago, then the one
    whose digests come first.
    """
    amounts = _flatten(shortfall_bytes, shortfall_places, shortfall_beyond)
    lack = Lack(amounts, shortfall_slots)
    for priority in sorted({victim.priority for victim in victims}) or (0,):
        offered = [victim for victim in victims if victim.priority <= priority]
        if lack.is_met_by(offered):
            return _cheapest(offered, lack)
    return None


def _cheapest(victims: list[Victim], lack: Lack) -> tuple[Victim, ...]:
    """Return the best of a greedy choice and of a search among the most worthwhile candidates."""
    by_density = sorted(victims, key=_density)
    greedy = _greedy(by_density, lack)
    search = _Search(by_density[: config.VICTIMS_SEARCHED_MAX], lack, greedy)
    search.walk(0, (), (0,) * len(lack.amounts))
    return tuple(sorted(search.best, key=lambda v: (v.last_used_s, v.digest)))


def _density(victim: Victim) -> tuple[float, float, str]:
    nbytes = victim.nbytes + sum(freed for freed, _ in victim.beyond)
    return (victim.cost / max(1, nbytes), victim.last_used_s, victim.digest)


def _greedy(ordered: list[Victim], lack: Lack) -> tuple[Victim, ...]:
    """Take the cheapest by the byte until it is enough; then spare what is superfluous."""
    chosen: list[Victim] = []
    for victim in ordered:
        if lack.is_met_by(chosen):
            break
        chosen.append(victim)
    # The dearest first: what can be spared of the set should be what is likeliest needed.
    for victim in sorted(chosen, key=lambda v: (-v.cost, -v.last_used_s, v.digest)):
        rest = [other for other in chosen if other is not victim]
        if lack.is_met_by(rest):
            chosen = rest
    return tuple(chosen)


class _Search:
    """Depth first through the subsets; whatever cannot become the best is cut off."""

    __slots__ = ("_freeable", "_lack", "_victims", "best", "best_rank")

    def __init__(self, victims: list[Victim], lack: Lack, known: tuple[Victim, ...]) -> None:
        self._victims = victims
        self._lack = lack
        self.best = known
        self.best_rank = _rank(known)
        # What the candidates from each place on could free: none are tried where that is too few.
        self._freeable = [lack.sum_of(victims[at:]) for at in range(len(victims) + 1)]

    def walk(self, at: int, chosen: tuple[Victim, ...], freed: Amounts) -> None:
        """Extend `chosen`, which leaves `freed`, by candidates from place `at` on."""
        if self._lack.is_met(freed, len(chosen)):
            rank = _rank(chosen)
            if rank < self.best_rank:
                self.best, self.best_rank = chosen, rank
            return
        left = len(self._victims) - at
        most = _add(freed, self._freeable[at])
        if not left or not self._lack.is_met(most, len(chosen) + left):
            return
        if sum(victim.cost for victim in chosen) > self.best_rank[0]:
            return
        victim = self._victims[at]
        self.walk(at + 1, (*chosen, victim), _add(freed, victim.frees))
        self.walk(at + 1, chosen, freed)


def _add(amounts: Amounts, others: Amounts) -> Amounts:
    return tuple(map(operator.add, amounts, others))


def _rank(chosen: tuple[Victim, ...]) -> Rank:
    return (
        sum(victim.cost for victim in chosen),
        len(chosen),
        sum(victim.last_used_s for victim in chosen),
        tuple(sorted(victim.digest for victim in chosen)),
    )
