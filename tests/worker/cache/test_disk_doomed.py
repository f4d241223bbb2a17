"""Prompts that memory is about to let go: in how many steps they are named, and in what order."""

from __future__ import annotations

from mlxd_shared.blocks.chain import names_of
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.disk.doomed import NAMED_MAX, WAITING_MAX, DoomedPrompts
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.prefix.trie_node import Key, Node, key_of

FORM = b"f" * 32
BLOCK_TOKENS = 256

PromptNode = Node[Kind, Snapshot]


def node_of(first: int, tokens: int) -> PromptNode:
    """Return a node that ends so many tokens, in two edges."""
    key = key_of(range(first, first + tokens))
    root: PromptNode = Node(None, Key(b""), 0)
    inner: PromptNode = Node(root, Key(key[: 2 * tokens]), 0)
    return Node(inner, Key(key[2 * tokens :]), 0)


def test_a_step_names_a_bounded_number_of_blocks() -> None:
    """At most `NAMED_MAX`, whatever waits, so that they take as many steps; and each prompt has its
    names in the end.
    """
    doomed = DoomedPrompts(FORM, block_tokens=BLOCK_TOKENS)
    nodes = [node_of(1000 * number, 110_000) for number in range(4)]
    for node in nodes:
        doomed.note(node)

    named_prompts = []
    steps = 0
    while doomed:
        named = doomed.advance()
        steps += 1
        if named is not None:
            named_prompts.append(named)

    assert steps == 4 * -(-(110_000 // BLOCK_TOKENS) // NAMED_MAX)
    keys = [node.key() for node in nodes]
    assert [named.key for named in named_prompts] == keys
    assert [tuple(named.names) for named in named_prompts] == [
        names_of(FORM, key, block_tokens=BLOCK_TOKENS) for key in keys
    ]


def test_a_prompt_that_is_noted_again_keeps_its_place() -> None:
    """Rows that leave often note the same prompts again and again: they are named all the same."""
    doomed = DoomedPrompts(FORM, block_tokens=BLOCK_TOKENS)
    nodes = [node_of(1000 * number, 40 * BLOCK_TOKENS) for number in range(3)]
    named_prompts = []
    for _ in range(9):
        for node in nodes:
            doomed.note(node)
        named = doomed.advance()
        if named is not None:
            named_prompts.append(named.key)
    assert named_prompts == [node.key() for node in nodes]


def test_so_many_wait_and_no_more() -> None:
    """Those beyond are left out until they are noted again; a short prompt has no block to name."""
    doomed = DoomedPrompts(FORM, block_tokens=BLOCK_TOKENS)
    for number in range(WAITING_MAX + 3):
        doomed.note(node_of(number, BLOCK_TOKENS - 1))
    assert len(doomed) == WAITING_MAX
    named = doomed.advance()
    assert named is not None
    assert named.names == []
    doomed.clear()
    assert doomed.advance() is None
