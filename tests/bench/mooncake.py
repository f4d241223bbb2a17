"""Replays a trace of real prompts through the prefix trie: hit tokens by budget and policy.

Scale: a key token is a block of 512 prompt tokens, a snapshot owns one unit a block, and an edge
has at most 1,024 prompt tokens, as in the worker. The last block of a prompt is left out where it
is not full: its hash says nothing about its tokens one by one. The trace has prompts only: what was
generated enters with the next prompt of the chat.
"""

from __future__ import annotations

import json
import lzma
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from mlxd_worker.cache.prefix.eviction import Candidate, Value, reuse_value
from mlxd_worker.cache.prefix.trie import EDGE_TOKENS_MAX, PrefixTrie
from mlxd_worker.cache.prefix.trie_node import key_of

BLOCK_TOKENS = 512
TRACE = ("traces", "mooncake_conversation.jsonl.xz")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the trace."""

    tokens: int
    blocks: tuple[int, ...]
    """Equal for two prompts as far as all their tokens are."""


class Kind(Enum):
    """The one kind of the replayed model."""

    BLOCKS = "blocks"

    @property
    def sliceable(self) -> bool:
        """Blocks can be kept one by one."""
        return True


class Units:
    """A snapshot that owns one unit a block."""

    __slots__ = ("on_materialise", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self.on_materialise: Callable[[int], None] | None = None

    @property
    def nbytes(self) -> int:
        """A unit a block."""
        return self.stop - self.start

    @property
    def row(self) -> None:
        """Never lazy."""
        return

    def split(self, at: int) -> tuple[Units | None, Units | None]:
        """Cut at a block's beginning."""
        if at <= self.start:
            return None, self
        if at >= self.stop:
            return self, None
        return Units(self.start, at), Units(at, self.stop)

    def close(self) -> None:
        """Own nothing that had to be given back."""


def merge(parent: Units, child: Units) -> Units:
    """Return one of two adjacent ones."""
    assert parent.stop == child.start
    return Units(parent.start, child.stop)


Policy: TypeAlias = Value[Kind, Units]
Judge: TypeAlias = Candidate[Kind, Units]


def least_recent(candidate: Judge, /) -> float:
    """Return the time of the last use: plain LRU."""
    return float(-candidate.idle)


class Future:
    """The clairvoyant: farthest next use first, which is what no real policy can know.

    A node is next used when its first block is, so the order is leaf-first by itself. For blocks of
    one size this is the most that any eviction reaches; for edges of one or two it is about that.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._uses: dict[int, deque[int]] = defaultdict(deque)
        for number, prompt in enumerate(prompts):
            for block in prompt.blocks:
                self._uses[block].append(number)

    def note_passed(self, prompt: Prompt) -> None:
        """Note that a prompt is now a thing of the past."""
        for block in prompt.blocks:
            self._uses[block].popleft()

    def __call__(self, candidate: Judge, /) -> float:
        """Return how soon the candidate is used again."""
        uses = self._uses[memoryview(candidate.node.edge).cast("I")[0]]
        return -float(uses[0]) if uses else -math.inf


def read_trace(path: Path) -> list[Prompt]:
    """Return the trace's prompts in order."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        Prompt(length, tuple(record["hash_ids"][: length // BLOCK_TOKENS]))
        for record in records
        for length in (int(record["input_length"]),)
    ]


def made_chats(chats: int, *, seed: int) -> list[Prompt]:
    """Return the prompts of made-up chats in the order of arrival: a second input, not fitted to.

    A chat begins every 3 s on average with one of 8 system prompts, the first ones far more often;
    it has 3 turns on average, each some blocks longer (one in six brings a document), after pauses
    that are mostly 1 to 5 minutes.
    """
    draws = random.Random(seed)
    numbers = count(1)
    systems = [tuple(next(numbers) for _ in range(2 + which)) for which in range(8)]
    timed_prompts: list[tuple[float, Prompt]] = []
    begins_s = 0.0
    for _ in range(chats):
        begins_s += draws.expovariate(1 / 3)
        asks_s = begins_s
        blocks = systems[min(int(draws.expovariate(0.7)), 7)]
        while True:
            longer = draws.randint(20, 60) if draws.random() < 1 / 6 else draws.randint(1, 8)
            blocks += tuple(next(numbers) for _ in range(longer))
            timed_prompts.append((asks_s, Prompt(len(blocks) * BLOCK_TOKENS + 1, blocks)))
            if draws.random() < 1 / 3:
                break
            asks_s += draws.lognormvariate(math.log(120), 0.8)
    return [prompt for _, prompt in sorted(timed_prompts, key=itemgetter(0))]


def distinct_blocks(prompts: Sequence[Prompt]) -> int:
    """Return what a cache without a budget would hold in the end."""
    return len({block for prompt in prompts for block in prompt.blocks})


def replay(
    prompts: Sequence[Prompt],
    budget_blocks: int,
    value: Policy,
    *,
    passed: Callable[[Prompt], None] = lambda _: None,
) -> int:
    """Return the tokens that a trie under `budget_blocks` saves from being evaluated."""
    edge_tokens = EDGE_TOKENS_MAX // BLOCK_TOKENS
    trie = PrefixTrie([Kind.BLOCKS], merge, value=value, edge_tokens=edge_tokens)
    hit_tokens = 0
    for prompt in prompts:
        key = key_of(prompt.blocks)
        match = trie.match(key)
        hit_tokens += min(match.count * BLOCK_TOKENS, prompt.tokens - 1)
        trie.touch(match, used=match.count)
        passed(prompt)
        if match.count < len(prompt.blocks):
            trie.insert(key, {Kind.BLOCKS: Units(match.count, len(prompt.blocks))})
            trie.evict(budget_blocks)
    return hit_tokens


def compare(prompts: Sequence[Prompt], budget_blocks: int) -> dict[str, int]:
    """Return the hit tokens of our policy, of LRU and of the clairvoyant."""
    future = Future(prompts)
    return {
        "ours": replay(prompts, budget_blocks, reuse_value),
        "lru": replay(prompts, budget_blocks, least_recent),
        "clairvoyant": replay(prompts, budget_blocks, future, passed=future.note_passed),
    }
