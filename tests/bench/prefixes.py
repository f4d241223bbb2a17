"""What the prefix trie costs and saves: a look-up's time, and tokens hit under a byte budget."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence

from mlxd_worker.cache.prefix.trie import PrefixTrie
from mlxd_worker.cache.prefix.trie_node import key_of
from tests.bench.mooncake import (
    TRACE,
    Kind,
    Units,
    compare,
    distinct_blocks,
    made_chats,
    merge,
    read_trace,
)
from tests.bench.report import json_line
from tests.real_inputs import real_input

BUDGETS_PERCENT = (15, 25, 40)
"""Of all distinct blocks: 9, 15 and 24 minutes of the trace's traffic. Below, see decision 0015."""
LOOKUP_TOKENS = 32_768
LOOKUP_PROMPTS = 200
LOOKUPS = 101
CHATS = 2000


def prefix_lines(budgets_percent: Sequence[int] = BUDGETS_PERCENT) -> list[str]:
    """Time look-ups and replay a trace and made-up chats; return JSON lines."""
    key_ms, match_ms = lookup_ms()
    lines = [
        json_line("prefix", key="trie.lookup_32k_ms", value=key_ms + match_ms),
        json_line("prefix", key="trie.lookup_32k_prebuilt_ms", value=match_ms),
    ]
    sys.stderr.write(
        f"prefix trie: 32k tokens looked up in {key_ms + match_ms:.3f} ms, "
        f"{match_ms:.3f} ms with a key made before\n"
    )
    inputs = {"chats": made_chats(CHATS, seed=1), "mooncake": read_trace(real_input(*TRACE))}
    for name, prompts in inputs.items():
        total_tokens = sum(prompt.tokens for prompt in prompts)
        for percent in budgets_percent:
            budget = distinct_blocks(prompts) * percent // 100
            hits_by_policy = compare(prompts, budget)
            best = hits_by_policy["clairvoyant"]
            sys.stderr.write(f"{name}, {percent} % of blocks, hit tokens in % of all: ")
            sys.stderr.writelines(f"{p} {h / total_tokens:.2%} " for p, h in hits_by_policy.items())
            sys.stderr.write(
                f"({hits_by_policy['ours'] / best:.3f}, {hits_by_policy['lru'] / best:.3f})\n"
            )
            lines += [
                json_line("prefix", key=f"{name}.{percent}.hit_tokens.{policy}", value=hit_tokens)
                for policy, hit_tokens in hits_by_policy.items()
            ]
    return lines


def lookup_ms() -> tuple[float, float]:
    """Return the median milliseconds of making a key of 32k tokens and of looking it up.

    The trie holds prompts of that length that part from each other all along the way.
    """
    draws = random.Random(5)
    trunk = [draws.randrange(1 << 17) for _ in range(LOOKUP_TOKENS)]
    trie = PrefixTrie([Kind.BLOCKS], merge)
    for _ in range(LOOKUP_PROMPTS):
        at = draws.randrange(LOOKUP_TOKENS)
        key = key_of([*trunk[:at], *(draws.randrange(1 << 17) for _ in trunk[at:])])
        known = trie.match(key).count
        trie.insert(key, {Kind.BLOCKS: Units(known, LOOKUP_TOKENS)})
    known = trie.match(key_of(trunk)).count
    trie.insert(key_of(trunk), {Kind.BLOCKS: Units(known, LOOKUP_TOKENS)})
    key_s, match_s = [], []
    for _ in range(LOOKUPS):
        began = time.perf_counter()
        key = key_of(trunk)
        keyed_s = time.perf_counter()
        match = trie.match(key, limit=LOOKUP_TOKENS - 1)
        match_s.append(time.perf_counter() - keyed_s)
        key_s.append(keyed_s - began)
        assert match.count == LOOKUP_TOKENS - 1
    return statistics.median(key_s) * 1e3, statistics.median(match_s) * 1e3
