"""What the prefix trie touches, counts and evicts."""

from __future__ import annotations

import pytest

from mlxd_worker.cache.prefix.trie_node import Key, Node, TrieError, Uses, key_of, length
from tests.worker.cache.trie_model import (
    NBYTES,
    Kind,
    Snapshot,
    Stand,
    Tokens,
    put,
    remove,
    tokens_of,
)

TOKEN_NBYTES = NBYTES[Kind.STANDARD]
STATE_NBYTES = NBYTES[Kind.RECURRENT]
A = (1, 2, 3, 4, 5, 6, 7, 8)


def pass_nodes(stand: Stand) -> dict[Tokens, tuple[int, int]]:
    """Return how often and when each node was last used."""
    return {tokens_of(n): (n.passed.count, n.passed.last) for n in stand.trie.nodes()}


def test_fault_10_counted_bytes_follow_a_lazy_snapshot(stand: Stand) -> None:
    """Bytes are 0 while lazy and exact afterwards, whatever was split or merged in between."""
    stand.put(*range(40), lazy=True)
    stand.put(*range(30), 90, lazy=True)
    assert stand.trie.nbytes == 0

    for snapshot in tuple(stand.book.open):
        snapshot.materialise()

    assert stand.trie.nbytes == stand.book.nbytes == 41 * TOKEN_NBYTES
    stand.check()


def test_fault_10_what_was_evicted_is_not_counted_again(stand: Stand) -> None:
    """A snapshot that is no longer in the trie has no hook into its counter."""
    stand.put(*A, lazy=True)
    (snapshot,) = stand.book.open
    stand.trie.clear()

    assert snapshot.on_materialise is None
    assert stand.trie.nbytes == 0


def test_lazy_snapshots_go_last(stand: Stand) -> None:
    """What owns nothing gives nothing back, and is kept while anything else can go."""
    stand.put(1, 2, 3, lazy=True)
    stand.put(4, 5, 6)
    stand.use(4, 5, 6)

    stand.trie.evict(0)

    assert stand.ends() == {(1, 2, 3)}


def test_fault_11_only_what_was_used_is_touched(stand: Stand) -> None:
    """A request makes nothing recent but the nodes it was restored from."""
    stand.put(1, 2, 3, 4)
    stand.put(1, 2, 7, 8)
    stand.put(9, 9)
    before = pass_nodes(stand)

    stand.use(1, 2, 7, 8)

    after = pass_nodes(stand)
    assert {tokens for tokens in after if after[tokens] != before[tokens]} == {(1, 2), (1, 2, 7, 8)}


def test_fault_11_a_full_trie_still_evicts(stand: Stand) -> None:
    """Under a budget that every request exceeds, old prompts go and the newest stay."""
    for chat in range(50):
        stand.use(chat, 1, 2, 3)
        stand.put(chat, 1, 2, 3)
        stand.trie.evict(10 * 4 * TOKEN_NBYTES)
        stand.check()

    assert stand.ends() == {(chat, 1, 2, 3) for chat in range(40, 50)}


def test_a_miss_passes_time_and_touches_nothing(stand: Stand) -> None:
    """A request that used nothing only makes everything older."""
    stand.put(1, 2, 3)

    stand.use(1, 2, 3, used=0)
    stand.use(1, 2, 3)

    assert pass_nodes(stand) == {(1, 2, 3): (2, 2)}


def test_more_than_the_match_cannot_be_used(stand: Stand) -> None:
    """Touching tokens that were not there is a bug of the caller."""
    stand.put(1, 2, 3)

    with pytest.raises(TrieError):
        stand.trie.touch(stand.trie.match(key_of([1, 2])), used=3)


def test_what_lies_behind_a_use_keeps_its_own_history(stand: Stand) -> None:
    """An edge used in part and split there is recent in front and as old as ever behind."""
    stand.put(*A)
    stand.use(*A)
    stand.use(1, 2, 3, 50, used=3)
    stand.put(1, 2, 3, 50)

    assert pass_nodes(stand) == {(1, 2, 3): (3, 2), A: (2, 1), (1, 2, 3, 50): (1, 2)}


def test_a_split_beyond_a_partial_use_leaves_both_sides_right(stand: Stand) -> None:
    """Split behind where the last use ended, the front still knows how far that went."""
    stand.put(*A)
    stand.use(*A, used=3)
    stand.put(*A[:6], 50)
    stand.put(*A[:3], 60)

    assert pass_nodes(stand)[A[:3]] == (2, 1)
    assert pass_nodes(stand)[A[:6]] == (1, 0)
    assert pass_nodes(stand)[A] == (1, 0)


def test_a_split_before_the_end_of_a_partial_use_makes_both_recent(stand: Stand) -> None:
    """Split in front of where the last use ended, both sides were used."""
    stand.put(*A)
    stand.use(*A, used=6)
    stand.put(*A[:3], 50)
    stand.put(*A[:6], 60)

    uses = pass_nodes(stand)
    assert (uses[A[:3]], uses[A[:6]], uses[A]) == ((2, 1), (2, 1), (1, 0))


def test_a_shorter_use_after_a_longer_one_spares_no_more(stand: Stand) -> None:
    """What the longer of two partial uses reached does not become as old as what none reached."""
    stand.put(*A)
    stand.use(*A, used=6)
    stand.use(*A, used=3)
    stand.put(*A[:4], 50)

    assert pass_nodes(stand)[A] == (3, 2)
    stand.put(*A[:6], 60)
    assert pass_nodes(stand)[A] == (1, 0)


def test_a_whole_use_ends_what_was_spared(stand: Stand) -> None:
    """Once all of an edge has been used, no part of it is older than the rest."""
    stand.put(*A)
    stand.use(*A, used=3)
    stand.use(*A)
    stand.put(*A[:5], 50)

    assert pass_nodes(stand)[A] == (3, 2)


def test_a_merge_keeps_the_later_use(stand: Stand) -> None:
    """Where a branch goes, its stem becomes one with what is left, which keeps its use."""
    stand.put(*A)
    stand.put(1, 2, 3, 50)
    stand.use(*A)
    (gone,) = [node for node in stand.trie.nodes() if tokens_of(node) == (1, 2, 3, 50)]
    remove(stand.trie, gone)

    (node,) = stand.trie.nodes()
    assert tokens_of(node) == A
    assert (node.passed.count, node.passed.last) == (2, 1)
    stand.check()


def test_a_merge_remembers_that_its_end_is_older(stand: Stand) -> None:
    """After a merge a split gives the back its own history again."""
    stand.put(*A)
    stand.use(1, 2, 3, used=3)
    other = stand.put(1, 2, 3, 50)
    remove(stand.trie, other)
    assert stand.ends() == {A}

    stand.put(1, 2, 3, 60)

    assert (pass_nodes(stand)[1, 2, 3], pass_nodes(stand)[A]) == ((2, 1), (1, 0))


def test_eviction_takes_states_before_what_hangs_behind_them(hybrid: Stand) -> None:
    """A state that saves little goes alone; the tokens in front of it stay for those behind."""
    hybrid.put(*A[:7])
    hybrid.put(*A)
    for _ in range(5):
        hybrid.use(*A)

    (gone,) = hybrid.trie.evict(hybrid.trie.nbytes - 1)

    assert (gone.states_only, gone.nbytes, gone.key) == (True, STATE_NBYTES, key_of(A[:7]))
    assert hybrid.ends() == {A}, "without its state the node has no reason to stand alone"
    hybrid.check()


def test_eviction_judges_a_node_anew_once_it_is_a_leaf(hybrid: Stand) -> None:
    """A node that many passed is not taken for its state, to which nobody came back."""
    hybrid.put(*A[:4])
    hybrid.put(*A)
    hybrid.put(9, 9)
    for _ in range(3):
        hybrid.use(*A, used=3)
    hybrid.use(9, 9)
    hybrid.use(*A, used=3)
    hybrid.use()

    gone = hybrid.trie.evict(0)

    assert [one.key for one in gone if not one.states_only] == [
        key_of(A), key_of((9, 9)), key_of(A[:4]),
    ]  # fmt: skip


def test_eviction_takes_tokens_that_nothing_restores(hybrid: Stand) -> None:
    """Once the states behind them are gone, tokens with no state at their end are worth nothing."""
    hybrid.put(*A)
    hybrid.put(1, 2, 3, 50)
    hybrid.put(9, 9)
    for _ in range(3):
        hybrid.use(9, 9)

    gone = hybrid.trie.evict(2 * TOKEN_NBYTES + STATE_NBYTES)

    assert hybrid.ends() == {(9, 9)}
    assert [length(one.key) - one.start for one in gone] == [1, 8]


def test_eviction_says_what_went(stand: Stand) -> None:
    """Each entry names the tokens that can no longer be restored, and the bytes given back."""
    stand.put(1, 2, 3, 4)
    stand.put(1, 2, 9)
    stand.use(1, 2, 9)

    (gone,) = stand.trie.evict(4 * TOKEN_NBYTES)

    assert (gone.key, gone.start) == (key_of((1, 2, 3, 4)), 2)
    assert gone.nbytes == 2 * TOKEN_NBYTES
    assert stand.ends() == {(1, 2, 9)}


def test_a_node_may_go_while_its_row_runs_on(stand: Stand) -> None:
    """A match already made can be read from though the trie has let its nodes go since."""
    stand.put(*A)
    match = stand.trie.match(key_of(A))
    stand.trie.evict(0)

    assert match.count == 8
    assert put(stand.trie, stand.book, (*A, 9), start=0) is not None
    assert stand.match(*A, 9) == 9


def test_a_use_is_counted_once() -> None:
    """The one that made a node counts as its first use."""
    node: Node[Kind, Snapshot] = Node(None, Key(b""), 4)

    assert node.passed == Uses(1, 4)
