"""Which idle models go to make room: the cheapest sufficient set, by one pure function.

Invariants:
- Only offered victims are chosen: the caller leaves out leased, loading, pinned and young ones.
- A model goes only where those of lower priority do not suffice, even all together.
- Up to VICTIMS_SEARCHED_MAX candidates the set is the cheapest there is; beyond, the cheapest
  found among the best that many. No member is superfluous. Equal offers give equal choices.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from mlxd_shared import config

Rank: TypeAlias = tuple[float, int, float, tuple[str, ...]]


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


@dataclass(frozen=True, slots=True)
class Lack:
    """What is to be had: bytes, models, and models of the device in question."""

    nbytes: int
    slots: int
    places: int = 0

    def is_met(self, nbytes: int, slots: int, places: int) -> bool:
        """Return whether so much is enough."""
        return nbytes >= self.nbytes and slots >= self.slots and places >= self.places

    def is_met_by(self, victims: Collection[Victim]) -> bool:
        """Return whether nothing is lacking when these have gone."""
        freed_bytes = sum(victim.nbytes for victim in victims)
        return self.is_met(freed_bytes, len(victims), sum(victim.places for victim in victims))


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
) -> tuple[Victim, ...] | None:
    """Return the cheapest sufficient set, or None where all together are too few.

    Among equally cheap sets the smaller goes, then the one that was used longest ago, then the one
    whose digests come first.
    """
    lack = Lack(shortfall_bytes, shortfall_slots, shortfall_places)
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
    search.walk(0, (), 0, 0)
    return tuple(sorted(search.best, key=lambda v: (v.last_used_s, v.digest)))


def _density(victim: Victim) -> tuple[float, float, str]:
    return (victim.cost / max(1, victim.nbytes), victim.last_used_s, victim.digest)


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

    __slots__ = ("_freeable", "_lack", "_places", "_victims", "best", "best_rank")

    def __init__(self, victims: list[Victim], lack: Lack, known: tuple[Victim, ...]) -> None:
        self._victims = victims
        self._lack = lack
        self.best = known
        self.best_rank = _rank(known)
        # What the candidates from each place on could free: none are tried where that is too few.
        self._freeable = [0] * (len(victims) + 1)
        self._places = [0] * (len(victims) + 1)
        for at in range(len(victims) - 1, -1, -1):
            self._freeable[at] = self._freeable[at + 1] + victims[at].nbytes
            self._places[at] = self._places[at + 1] + victims[at].places

    def walk(self, at: int, chosen: tuple[Victim, ...], freed: int, places: int) -> None:
        """Extend `chosen`, which frees `freed` and `places`, by candidates from place `at` on."""
        if self._lack.is_met(freed, len(chosen), places):
            rank = _rank(chosen)
            if rank < self.best_rank:
                self.best, self.best_rank = chosen, rank
            return
        left = len(self._victims) - at
        most = (freed + self._freeable[at], len(chosen) + left, places + self._places[at])
        if not left or not self._lack.is_met(*most):
            return
        if sum(victim.cost for victim in chosen) > self.best_rank[0]:
            return
        victim = self._victims[at]
        self.walk(at + 1, (*chosen, victim), freed + victim.nbytes, places + victim.places)
        self.walk(at + 1, chosen, freed, places)


def _rank(chosen: tuple[Victim, ...]) -> Rank:
    return (
        sum(victim.cost for victim in chosen),
        len(chosen),
        sum(victim.last_used_s for victim in chosen),
        tuple(sorted(victim.digest for victim in chosen)),
    )
