"""A small memory of evictions, so that a miss can be explained by one. Pure.

Invariants:
- At most `RUNS_MAX` runs of `TOKENS_MAX` tokens in all are remembered, the latest; no run is the
  beginning of another. A longer run is remembered by its beginning.
- Of the states that were evicted while their tokens stayed, `STATES_MAX` are remembered, by length
  and hash. A hash goes on from a shorter one, so a key is read once, however many are remembered.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

from mlxd_worker.cache.prefix.trie_node import Key, common, length, part

RUNS_MAX = 64
TOKENS_MAX = 1 << 20
"""4 MiB."""
STATES_MAX = 256
HASH_NBYTES = 16


class EvictedRuns:
    """The token runs, from a prompt's beginning on, whose snapshots were evicted last."""

    def __init__(self) -> None:
        self._runs: list[Key] = []
        self._states: deque[tuple[int, bytes]] = deque(maxlen=STATES_MAX)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return sum(map(length, self._runs))

    def remember(self, key: Key, *, states_only: bool = False) -> None:
        """Note that what was kept for the end of `key` is gone, or only the state at its end."""
        if states_only:
            self._states.append((length(key), blake2b(key, digest_size=HASH_NBYTES).digest()))
            return
        run = part(key, 0, TOKENS_MAX)
        if any(known.startswith(run) for known in self._runs):
            return
        self._runs = [known for known in self._runs if not run.startswith(known)]
        self._runs.append(run)
        while len(self._runs) > RUNS_MAX or self.tokens > TOKENS_MAX:
            del self._runs[0]

    def match(self, key: Key) -> int:
        """Return how much of `key`, from its beginning, is the beginning of an evicted run."""
        best = 0
        for run in self._runs:
            # Most runs share little with a key, or no more than others do: one comparison tells.
            if run.startswith(part(key, 0, best + 1)):
                best = common(run, key, 0)
        return best

    def had_state(self, key: Key, *, beyond: int) -> bool:
        """Tell whether a state was evicted that stood for more than `beyond` tokens of `key`."""
        # The last token of a prompt is always evaluated, so no state is looked for at its end.
        within = {n for n, _ in self._states if beyond < n < length(key)}
        running, at = blake2b(digest_size=HASH_NBYTES), 0
        states: set[tuple[int, bytes]] = set()
        for n in sorted(within):
            running.update(part(key, at, n))
            at = n
            states.add((n, running.digest()))
        return not states.isdisjoint(self._states)
