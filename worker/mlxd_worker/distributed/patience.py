"""When a group has waited too long, on a clock that stops while this process does. Pure.

Invariants:
- Of the time between two looks at most LOOK_COUNTS_S counts: longer ones mean that this process, or
  the machine, was stopped, and what arrived meanwhile has not been read yet.
- No rank is silent before all have met: whoever joins a group holds the interpreter, and no thread
  of it beats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mlxd_shared import config

LOOK_S: Final = config.RANK_BEAT_S / 2
"""How long to wait between two looks: limits hold to within that."""
LOOK_COUNTS_S: Final = config.RANK_BEAT_S


class Patience:
    """Silence of ranks, and when what is being done is due. Any thread notes; one looks."""

    def __init__(self, now_s: float) -> None:
        """Begin at `now_s` of a monotonic clock."""
        self._looked_s = now_s
        self._awake_s = 0.0
        self._heard_s: dict[int, float] = {}
        self._due_s: float | None = None

    def meet(self, ranks: Iterable[int]) -> None:
        """Count the silence of these ranks from now on."""
        self._heard_s = dict.fromkeys(ranks, self._awake_s)

    def hear(self, rank: int) -> None:
        """Know that a rank has said something."""
        if rank in self._heard_s:
            self._heard_s[rank] = self._awake_s

    def begin(self, limit_s: float) -> None:
        """Know that something has begun, or gone on, that is due after `limit_s`."""
        self._due_s = self._awake_s + limit_s

    def end(self) -> None:
        """Know that it is over."""
        self._due_s = None

    def look(self, now_s: float) -> str:
        """Return what has taken too long; "" if nothing has."""
        self._awake_s += min(now_s - self._looked_s, LOOK_COUNTS_S)
        self._looked_s, due_s = now_s, self._due_s
        for rank, heard_s in self._heard_s.items():
            if self._awake_s - heard_s > config.RANK_SILENT_S:
                return f"rank {rank} is silent"
        if due_s is not None and self._awake_s > due_s:
            return "a step is not over in time"
        return ""
