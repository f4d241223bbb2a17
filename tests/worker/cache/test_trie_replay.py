"""Real and made-up prompts replayed through the trie: tokens saved against LRU and clairvoyance."""

from __future__ import annotations

import pytest

from mlxd_worker.cache.prefix.eviction import reuse_value
from tests.bench.mooncake import (
    TRACE,
    Prompt,
    compare,
    distinct_blocks,
    least_recent,
    made_chats,
    read_trace,
    replay,
)
from tests.real_inputs import real_input
from tests.support.effort import spread_evenly

SLICE = 3000
CHANCE = 0.005
"""How much two orders of about the same worth differ by the luck of single prompts."""


@pytest.mark.parametrize(
    ("percent", "of_lru", "of_clairvoyant"),
    spread_evenly([(5, 1, 0.2), (15, 1, 0.55), (40, 1 - CHANCE, 0.85)], 1),
)
def test_a_real_trace_saves_more_than_by_recency(
    percent: int, of_lru: float, of_clairvoyant: float
) -> None:
    """On a quarter of the trace ours saves more than LRU where room is short, else as much."""
    prompts = read_trace(real_input(*TRACE))[:SLICE]

    hits = compare(prompts, distinct_blocks(prompts) * percent // 100)

    assert hits["ours"] >= of_lru * hits["lru"]
    assert hits["ours"] >= of_clairvoyant * hits["clairvoyant"]


@pytest.mark.parametrize(("percent", "least"), spread_evenly([(5, 0.4), (15, 0.75), (40, 0.95)], 1))
def test_made_up_chats_lose_nothing_to_recency(percent: int, least: float) -> None:
    """Where uses tell nothing of the next one, ours is as good as LRU but for chance."""
    prompts = made_chats(600, seed=2)

    hits = compare(prompts, distinct_blocks(prompts) * percent // 100)

    assert hits["ours"] >= (1 - CHANCE) * hits["lru"]
    assert hits["ours"] >= least * hits["clairvoyant"]


def test_a_replay_without_a_budget_saves_all_that_repeats() -> None:
    """With room for everything each policy hits exactly the blocks that were there before."""
    prompts = made_chats(100, seed=3)
    seen: set[int] = set()
    expected = 0
    for prompt in prompts:
        expected += 512 * len(seen & set(prompt.blocks))
        seen |= set(prompt.blocks)

    room = distinct_blocks(prompts)

    assert compare(prompts, room) == dict.fromkeys(("ours", "lru", "clairvoyant"), expected)


def test_a_replay_always_leaves_a_token() -> None:
    """A prompt that is there already saves all of its tokens but one."""
    prompts = [Prompt(1024, (1, 2)), Prompt(1024, (1, 2))]

    assert replay(prompts, 10, reuse_value) == replay(prompts, 10, least_recent) == 1023
