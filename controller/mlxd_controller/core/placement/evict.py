"""Which idle models go to make room: the cheapest sufficient set, by one pure function.

Invariants:
- Only what is offered is chosen: whoever offers leaves out the leased, loading, pinned and young.
- A model goes only where those of lower priority do not suffice, even all together.
- Up to VICTIMS_SEARCHED_MAX candidates the set is the cheapest there is; beyond, the cheapest
  found among the best that many. No member is superfluous. Equal offers give equal choices.
"""

from __future__ import annotations

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


def dearness(chosen: tuple[Victim, ...]) -> tuple[int, Rank]:
    """Return by what sets of different devices are compared: the highest priority, then the cost.

    Among equally dear ones the smaller goes, and so on as in `choose`.
    """
    return max((victim.priority for victim in chosen), default=0), _rank(chosen)


def choose(
    victims: tuple[Victim, ...], *, shortfall_bytes: int, shortfall_slots: int
) -> tuple[Victim, ...] | None:
    """Return the cheapest sufficient set, or None where all together are too few.

    Among equally cheap sets the smaller goes, then the one that was used longest ago, then the one
    whose digests come first.
    """
    for priority in sorted({victim.priority for victim in victims}) or (0,):
        offered = [victim for victim in victims if victim.priority <= priority]
        if _sufficient(offered, shortfall_bytes, shortfall_slots):
            return _cheapest(offered, shortfall_bytes, shortfall_slots)
    return None


def _cheapest(
    victims: list[Victim], shortfall_bytes: int, shortfall_slots: int
) -> tuple[Victim, ...]:
    """Return the best of a greedy choice and of a search among the most worthwhile candidates."""
    by_density = sorted(victims, key=_density)
    greedy = _greedy(by_density, shortfall_bytes, shortfall_slots)
    searched = by_density[: config.VICTIMS_SEARCHED_MAX]
    search = _Search(searched, shortfall_bytes, shortfall_slots, greedy)
    search.walk(0, (), 0)
    return tuple(sorted(search.best, key=lambda v: (v.last_used_s, v.digest)))


def _density(victim: Victim) -> tuple[float, float, str]:
    return (victim.cost / max(1, victim.nbytes), victim.last_used_s, victim.digest)


def _greedy(
    ordered: list[Victim], shortfall_bytes: int, shortfall_slots: int
) -> tuple[Victim, ...]:
    """Take the cheapest by the byte until it is enough; then spare what is superfluous."""
    chosen: list[Victim] = []
    for victim in ordered:
        if _sufficient(chosen, shortfall_bytes, shortfall_slots):
            break
        chosen.append(victim)
    # The dearest first: what can be spared of the set should be what is likeliest needed.
    for victim in sorted(chosen, key=lambda v: (-v.cost, -v.last_used_s, v.digest)):
        rest = [other for other in chosen if other is not victim]
        if _sufficient(rest, shortfall_bytes, shortfall_slots):
            chosen = rest
    return tuple(chosen)


class _Search:
    """Depth first through the subsets; whatever cannot become the best is cut off."""

    __slots__ = ("_freeable", "_slots", "_victims", "best", "best_rank", "short")

    def __init__(
        self,
        victims: list[Victim],
        shortfall_bytes: int,
        shortfall_slots: int,
        known: tuple[Victim, ...],
    ) -> None:
        self._victims = victims
        self.short = shortfall_bytes
        self._slots = shortfall_slots
        self.best = known
        self.best_rank = _rank(known)
        # What the candidates from each place on could free: none are tried where that is too few.
        self._freeable = [0] * (len(victims) + 1)
        for at in range(len(victims) - 1, -1, -1):
            self._freeable[at] = self._freeable[at + 1] + victims[at].nbytes

    def walk(self, at: int, chosen: tuple[Victim, ...], freed: int) -> None:
        """Extend `chosen`, which frees `freed`, by candidates from place `at` on."""
        if freed >= self.short and len(chosen) >= self._slots:
            rank = _rank(chosen)
            if rank < self.best_rank:
                self.best, self.best_rank = chosen, rank
            return
        left = len(self._victims) - at
        if freed + self._freeable[at] < self.short or len(chosen) + left < self._slots:
            return
        if sum(victim.cost for victim in chosen) > self.best_rank[0] or not left:
            return
        victim = self._victims[at]
        self.walk(at + 1, (*chosen, victim), freed + victim.nbytes)
        self.walk(at + 1, chosen, freed)


def _rank(chosen: tuple[Victim, ...]) -> Rank:
    return (
        sum(victim.cost for victim in chosen),
        len(chosen),
        sum(victim.last_used_s for victim in chosen),
        tuple(sorted(victim.digest for victim in chosen)),
    )


def _sufficient(
    chosen: list[Victim] | tuple[Victim, ...], shortfall_bytes: int, shortfall_slots: int
) -> bool:
    freed = sum(victim.nbytes for victim in chosen)
    return freed >= shortfall_bytes and len(chosen) >= shortfall_slots
