"""Replays prompts through memory and a disk under it: hit tokens by what is written when.

Scale as in `mooncake`: a unit is a block of 512 prompt tokens, in memory and on disk, and time is
counted in requests. Memory is the worker's trie with its policy, the disk its index; every block is
taken to be worth writing, and to be written at once. What is on disk is read without a copy in
memory's budget until the row leaves, as in the worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mlxd_shared.blocks.block_file import BlockId, Part
from mlxd_shared.blocks.index import BlockIndex, Entry
from mlxd_worker.cache.prefix.eviction import reuse_value
from mlxd_worker.cache.prefix.prefix import DOOMED_FRACTION, SHORT_FRACTION
from mlxd_worker.cache.prefix.trie import EDGE_TOKENS_MAX, PrefixTrie
from mlxd_worker.cache.prefix.trie_node import key_of
from tests.bench.mooncake import (
    BLOCK_TOKENS,
    TRACE,
    Future,
    Kind,
    Prompt,
    Units,
    distinct_blocks,
    made_chats,
    merge,
    read_trace,
    replay,
)
from tests.bench.report import json_line
from tests.real_inputs import real_input

BUDGETS_PERCENT = (5, 10)
"""Memory's, of all distinct blocks."""
DISK_TIMES = 4
"""The disk's budget in memories."""
CHATS = 2000
TWICE, SHORT = "twice", "ours"
"""What is written: what memory was used for again; or also what it has when it is short."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay has come to."""

    hit_tokens: int
    written_blocks: int


class Disk:
    """The blocks on a disk of so many units."""

    def __init__(self, budget_blocks: int) -> None:
        self._index = BlockIndex()
        self._budget_blocks = budget_blocks
        self.written = 0

    def reach(self, prompt: Prompt, start: int, now: float) -> int:
        """Return how many blocks of a prompt there are on end, `start` of them in memory."""
        stop = start
        while stop < len(prompt.blocks) and self._has(prompt.blocks[stop]):
            stop += 1
        for block in prompt.blocks[:stop]:
            self._index.use(_id_of(block), now)
        return stop

    def write(self, blocks: Sequence[int], now: float) -> None:
        """Write the first blocks of a prompt, as far as they are not there."""
        for depth, block in enumerate(blocks):
            if self._has(block):
                continue
            victims = self._index.choose_victims(1, budget_nbytes=self._budget_blocks, now_s=now)
            for victim in victims:
                self._index.drop(victim.id)
            self._index.add(Entry(_id_of(block), depth, 1, now))
            self.written += 1

    def _has(self, block: int) -> bool:
        return self._index.get(_id_of(block)) is not None


def replay_with_disk(
    prompts: Sequence[Prompt], memory_blocks: int, disk_blocks: int, *, when: str = SHORT
) -> Replayed:
    """Return what memory and disk of so many blocks save from being evaluated."""
    edge_tokens = EDGE_TOKENS_MAX // BLOCK_TOKENS
    trie = PrefixTrie([Kind.BLOCKS], merge, value=reuse_value, edge_tokens=edge_tokens)
    disk = Disk(disk_blocks)
    hit_tokens = 0
    for number, prompt in enumerate(prompts):
        now = float(number)
        key = key_of(prompt.blocks)
        match = trie.match(key)
        reached = disk.reach(prompt, match.count, now)
        hit_tokens += min(reached * BLOCK_TOKENS, prompt.tokens - 1)
        disk.write(prompt.blocks[: match.count], now)
        trie.touch(match, used=match.count)
        if match.count < len(prompt.blocks):
            trie.insert(key, {Kind.BLOCKS: Units(match.count, len(prompt.blocks))})
            trie.evict(memory_blocks)
        if when == SHORT and trie.nbytes > SHORT_FRACTION * memory_blocks:
            for node in trie.find_doomed(int(DOOMED_FRACTION * memory_blocks)):
                disk.write(memoryview(node.key()).cast("I"), now)
    return Replayed(hit_tokens, disk.written)


def disk_lines(budgets_percent: Sequence[int] = BUDGETS_PERCENT) -> list[str]:
    """Replay a trace and made-up chats; return JSON lines: shares of the clairvoyant's hits.

    The clairvoyant has one memory with as much room as memory and disk have together.
    """
    lines: list[str] = []
    inputs = {"chats": made_chats(CHATS, seed=1), "mooncake": read_trace(real_input(*TRACE))}
    for name, prompts in inputs.items():
        distinct = distinct_blocks(prompts)
        for percent in budgets_percent:
            memory_blocks = distinct * percent // 100
            whole = (1 + DISK_TIMES) * memory_blocks
            future = Future(prompts)
            best = replay(prompts, whole, future, passed=future.note_passed)
            ratios = {
                "memory": replay(prompts, memory_blocks, reuse_value) / best,
                "one_memory": replay(prompts, whole, reuse_value) / best,
            }
            for when in (TWICE, SHORT):
                done = replay_with_disk(
                    prompts, memory_blocks, DISK_TIMES * memory_blocks, when=when
                )
                ratios[when] = done.hit_tokens / best
                ratios[f"{when}.written"] = done.written_blocks / distinct
            sys.stderr.write(f"{name}, memory {percent} %, disk {DISK_TIMES} times that: ")
            sys.stderr.writelines(f"{key} {ratio:.3f} " for key, ratio in ratios.items())
            sys.stderr.write("\n")
            lines += [
                json_line("prefix", key=f"disk.{name}.{percent}.{key}", value=ratio)
                for key, ratio in ratios.items()
            ]
    return lines


def _id_of(block: int) -> BlockId:
    return BlockId(block.to_bytes(8, "little"), Part.ENTRIES)


if __name__ == "__main__":
    sys.stdout.write("\n".join(disk_lines()) + "\n")
