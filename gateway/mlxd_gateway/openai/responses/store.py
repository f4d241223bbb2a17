"""Responses that are kept for a while, each for its owner alone. Pure: the time is an argument.

Invariants:
- There are at most `count_max`, of at most `nbytes_max` together, each used within the last
  `age_s`. What was used longest ago goes first.
- Whoever is kept has all kept that it goes on from, but for what its owner deleted: a use of a
  response is one of all before it, each later than what follows it.
- To anybody but its owner a response is not there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from mlxd_shared import config

ENTRY_NBYTES = 1024
"""What an entry takes beside its texts, and more than that."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One response: its input's items and itself, in JSON."""

    id: str
    owner: str
    model: str
    """The name that was asked for."""
    input: bytes
    response: bytes
    previous_id: str = ""
    """What it goes on from; empty: nothing."""

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return ENTRY_NBYTES + len(self.input) + len(self.response)


class ResponseStore:
    """For one owner, on one thread. `now_s` never goes back."""

    def __init__(
        self,
        *,
        nbytes_max: int = config.HTTP_RESPONSES_BYTES_MAX,
        count_max: int = config.HTTP_RESPONSES_MAX,
        age_s: float = config.HTTP_RESPONSE_AGE_S,
    ) -> None:
        """Begin empty."""
        self._nbytes_max = nbytes_max
        self._count_max = count_max
        self._age_s = age_s
        self._nbytes = 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        """What was used longest ago first."""
        self._used_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """What all of them take."""
        return self._nbytes

    def put(self, kept: Kept, now_s: float) -> None:
        """Keep a response whose id is new, if it fits at all."""
        self._kept[kept.id] = kept
        self._nbytes += kept.nbytes
        self._use(kept, now_s)
        self._expire(now_s)
        while self._nbytes > self._nbytes_max or len(self._kept) > self._count_max:
            self._drop(next(iter(self._kept)))

    def get(self, response_id: str, owner: str, now_s: float) -> Kept | None:
        """Return a response, which is used by that; None: its owner has none of this id."""
        self._expire(now_s)
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner:
            return None
        self._use(kept, now_s)
        return kept

    def before(self, kept: Kept) -> Iterator[Kept | None]:
        """Yield what a response goes on from, latest first; None, last, where one is deleted."""
        while kept.previous_id:
            previous = self._kept.get(kept.previous_id)
            yield previous
            if previous is None:
                return
            kept = previous

    def delete(self, response_id: str, owner: str) -> bool:
        """Forget a response; return whether it was there."""
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner:
            return False
        self._drop(response_id)
        return True

    def _use(self, kept: Kept, now_s: float) -> None:
        for each in (kept, *self.before(kept)):
            if each is not None:
                self._kept.move_to_end(each.id)
                self._used_s[each.id] = now_s

    def _expire(self, now_s: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept))
            if now_s - self._used_s[oldest] < self._age_s:
                return
            self._drop(oldest)

    def _drop(self, response_id: str) -> None:
        self._nbytes -= self._kept.pop(response_id).nbytes
        del self._used_s[response_id]
