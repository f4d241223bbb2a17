"""What a kept prefix is worth, and the order in which the trie makes room by it. Pure.

Invariants:
- A value compares candidates at one moment; it is the expected gain of keeping a byte a little
  longer, up to a factor common to all.
- What owns nothing is worth keeping at any price; what can restore nothing is worth nothing.
- Nothing is fitted to a budget, a model or a trace; docs/decisions/0015 has the measurements.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Generic, NamedTuple

from mlxd_worker.cache.prefix.trie_node import K, Node, S

USES_WEIGHT = 0.25
"""What e times the uses adds to the rate of reuse; 1 gains more where the budget is very short,
and loses to plain recency where it is ample."""

RERANK_REQUESTS = 64
"""At most between two reckonings of everything's worth: the unused only change with time."""

NODES_A_REQUEST = 16
"""How many nodes may be reckoned anew for each request, on average, before that many are due."""


class Candidate(NamedTuple, Generic[K, S]):
    """What could go: a leaf with all it has, or the whole-state snapshots of an inner node."""

    node: Node[K, S]
    gain_tokens: int
    """What a request that reaches the node's end would have to evaluate again without it."""
    nbytes: int
    """What closing it gives back now."""
    uses: int
    """Requests that used it, the one that made it included; at least 1."""
    idle: int
    """Requests since the last of them."""


Value = Callable[[Candidate[K, S]], float]
"""Says what a candidate is worth, any float but NaN; least goes first, of equals the deepest."""


def reuse_value(candidate: Candidate[K, S], /) -> float:
    """Return the tokens that keeping a byte saves a request, times the rate of such requests.

    Chats pause for very different times, so the longer one has been idle, the longer it is likely
    to stay so: the rate falls with 1 / idle time. Each reuse makes another likelier, but gently:
    what was used much, long ago, is over.
    """
    if not candidate.nbytes:
        return math.inf
    rate = (1 + USES_WEIGHT * math.log(candidate.uses)) / (1 + candidate.idle)
    return rate * candidate.gain_tokens / candidate.nbytes


class Ranking(Generic[K, S]):
    """The nodes of which something could go, least worth first.

    A node's worth is reckoned when it is noted and again when its turn comes; of all others it is
    as of the last ranking, at most `rerank_requests` requests ago when `rank` was last called. So
    one eviction costs little however many nodes there are.
    """

    def __init__(self, worth: Callable[[Node[K, S]], float], *, rerank_requests: int) -> None:
        """Make an empty ranking by `worth`."""
        self._worth = worth
        self._rerank_requests = rerank_requests
        self._ranked_at = 0
        self._numbers = count()
        self._entries: dict[Node[K, S], int] = {}
        self._heap: list[tuple[float, int, int, Node[K, S]]] = []

    def __contains__(self, node: Node[K, S]) -> bool:
        return node in self._entries

    def note(self, node: Node[K, S]) -> None:
        """Let a node take part, or take part with what it is worth now."""
        self._push(node, self._worth(node))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def drop(self, node: Node[K, S]) -> None:
        """Leave a node out; nothing happens where it takes no part."""
        self._entries.pop(node, None)

    def clear(self) -> None:
        """Leave all out."""
        self._entries.clear()
        self._heap.clear()

    def rank(self, now: int) -> None:
        """Reckon every node's worth where the last time was too many requests ago.

        Few nodes are reckoned more often: so are the young, whose worth falls fast, ranked right.
        """
        patience = min(self._rerank_requests, len(self._entries) // NODES_A_REQUEST)
        if now - self._ranked_at < patience:
            return
        self._ranked_at = now
        self._heap.clear()
        for node in self._entries:
            self._push(node, self._worth(node))

    def least(self) -> Node[K, S]:
        """Return the node of least worth, of equals the deepest; there must be one."""
        while True:
            worth, _, number, node = heapq.heappop(self._heap)
            if self._entries.get(node) != number:
                continue
            worth_now = self._worth(node)
            self._push(node, worth_now)
            if worth_now <= worth or self._heap[0][2] == self._entries[node]:
                return node

    def lowest(self, count: int) -> list[Node[K, S]]:
        """Return so many nodes of least worth, or all, the least first."""
        return heapq.nsmallest(
            count, self._entries, key=lambda node: (self._worth(node), -node.stop)
        )

    def _push(self, node: Node[K, S], worth: float) -> None:
        number = self._entries[node] = next(self._numbers)
        heapq.heappush(self._heap, (worth, -node.stop, number, node))
