"""A small memory of what was evicted, so that a miss can say that it was there. Pure.

Invariants:
- At most `RUNS_MAX` runs of `TOKENS_MAX` tokens in all are remembered, the latest; no run is the
  beginning of another. A longer run is remembered by its beginning.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

RUNS_MAX = 64
TOKENS_MAX = 1 << 20
"""4 MiB."""


class EvictedRuns:
    """The token runs, from a prompt's beginning on, whose snapshots were evicted last."""

    def __init__(self) -> None:
        self._runs: list[array[int]] = []

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return sum(map(len, self._runs))

    def remember(self, tokens: Sequence[int]) -> None:
        """Note that what was kept for the end of `tokens` is gone."""
        run = array("i", tokens[:TOKENS_MAX])
        for known in self._runs:
            if known[: len(run)] == run:
                return
        self._runs = [known for known in self._runs if run[: len(known)] != known]
        self._runs.append(run)
        while len(self._runs) > RUNS_MAX or self.tokens > TOKENS_MAX:
            del self._runs[0]

    def matched(self, prompt: Sequence[int]) -> int:
        """Return how much of `prompt`, from its beginning, is the beginning of an evicted run."""
        wanted = array("i", prompt)
        best = 0
        for run in self._runs:
            if run[: best + 1] == wanted[: best + 1]:
                best = max(best, _common(run, wanted, best))
        return best


def _common(left: array[int], right: array[int], known: int) -> int:
    """Return the length of the common beginning, of which `known` tokens are known."""
    low, high = known, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
