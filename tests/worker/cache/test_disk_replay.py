"""Made-up chats replayed through memory and a disk under it: what the order of writing saves."""

from __future__ import annotations

from mlxd_worker.cache.prefix.eviction import reuse_value
from tests.bench.disk_replay import DISK_TIMES, SHORT, TWICE, replay_with_disk
from tests.bench.mooncake import distinct_blocks, made_chats, replay

PERCENT = 10


def test_what_short_memory_loses_is_on_disk() -> None:
    """Disk at four times memory: nearly what one memory with that room in all would hit, which
    writing after a second use alone is not: what memory evicts before it is never written.
    """
    prompts = made_chats(300, seed=4)
    memory_blocks = distinct_blocks(prompts) * PERCENT // 100
    one_memory = replay(prompts, (1 + DISK_TIMES) * memory_blocks, reuse_value)

    hits = {
        when: replay_with_disk(prompts, memory_blocks, DISK_TIMES * memory_blocks, when=when)
        for when in (TWICE, SHORT)
    }

    assert hits[SHORT].hit_tokens >= 0.95 * one_memory
    assert hits[TWICE].hit_tokens < 0.9 * one_memory
    assert hits[SHORT].written_blocks <= 1.1 * distinct_blocks(prompts)


def test_a_disk_of_nothing_changes_nothing() -> None:
    """Without room on disk the hits are those of memory alone."""
    prompts = made_chats(100, seed=5)
    memory_blocks = distinct_blocks(prompts) * PERCENT // 100
    alone = replay(prompts, memory_blocks, reuse_value)
    assert replay_with_disk(prompts, memory_blocks, 0).hit_tokens == alone
