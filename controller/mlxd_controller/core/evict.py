"""Which idle models go to make room: one pure function, to be replaced by a better one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Victim:
    """A model that may be evicted: ready, idle, not pinned."""

    digest: str
    nbytes: int
    last_used_s: float


def choose(
    victims: tuple[Victim, ...], *, shortfall_bytes: int, shortfall_slots: int
) -> tuple[Victim, ...] | None:
    """Return a sufficient set of which no member is superfluous, or None where all are too few.

    The least recently used go first; a member that the later ones made superfluous stays. Equal
    times are ordered by digest, so that equal states give equal answers.
    """
    chosen: list[Victim] = []
    for victim in sorted(victims, key=lambda v: (v.last_used_s, v.digest)):
        if _sufficient(chosen, shortfall_bytes, shortfall_slots):
            break
        chosen.append(victim)
    if not _sufficient(chosen, shortfall_bytes, shortfall_slots):
        return None
    # Most recently used first: what can be spared of the set should be what is likeliest needed.
    for victim in reversed(tuple(chosen)):
        rest = [other for other in chosen if other is not victim]
        if _sufficient(rest, shortfall_bytes, shortfall_slots):
            chosen = rest
    return tuple(chosen)


def _sufficient(chosen: list[Victim], shortfall_bytes: int, shortfall_slots: int) -> bool:
    freed = sum(victim.nbytes for victim in chosen)
    return freed >= shortfall_bytes and len(chosen) >= shortfall_slots
