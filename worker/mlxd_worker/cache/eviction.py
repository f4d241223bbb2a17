"""What a kept prefix is worth: the policy by which the trie makes room. Pure, no state.

Invariants:
- A value compares candidates at one moment; it is the expected gain of keeping a byte a little
  longer, up to a factor common to all.
- What owns nothing is worth keeping at any price; what can restore nothing is worth nothing.
- Nothing is fitted to a budget, a model or a trace; docs/decisions/0013 has the measurements.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, Protocol

from mlxd_worker.cache.trie_node import K, Node, S


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


class Value(Protocol[K, S]):
    """Says what a candidate is worth; the least goes first, of equals the deepest."""

    def __call__(self, candidate: Candidate[K, S], /) -> float:
        """Return the worth; any float but NaN."""
        ...


def reuse_value(candidate: Candidate[K, S], /) -> float:
    """Return the tokens that keeping a byte saves a request, times the rate of such requests.

    Chats pause for very different times, so the longer one has been idle, the longer it is likely
    to stay so: the rate falls with 1 / idle time. Each reuse makes the next one likelier, but by
    less and less: it grows with the logarithm of the uses.
    """
    if not candidate.nbytes:
        return math.inf
    rate = (1 + math.log(candidate.uses)) / (1 + candidate.idle)
    return rate * candidate.gain_tokens / candidate.nbytes


def least_recent(candidate: Candidate[K, S], /) -> float:
    """Return the time of the last use: plain LRU, which the policy is measured against."""
    return float(-candidate.idle)
