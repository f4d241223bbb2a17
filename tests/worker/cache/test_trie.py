"""The prefix trie: keys, look-ups, the numeric cases, and what becomes of edges and snapshots."""

from __future__ import annotations

import random

import pytest

from mlxd_worker.cache.prefix.trie import EDGE_TOKENS_MAX
from mlxd_worker.cache.prefix.trie_node import Key, TrieError, common, key_of, length, part
from tests.worker.cache.trie_model import NBYTES, Kind, Snapshot, Stand, put, tags, tokens_of

A = (1, 2, 3, 4, 5, 6, 7, 8)


def test_keys_compare_as_bytes() -> None:
    """A key's length, parts and common beginnings are those of its tokens."""
    draws = random.Random(3)
    for _ in range(300):
        edge = [draws.randrange(2) for _ in range(draws.randrange(1, 20))]
        other = [draws.randrange(2) for _ in range(draws.randrange(25))]
        at = draws.randrange(len(other) + 1)
        pairs = zip(edge, other[at:], strict=False)
        expected = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(edge), len(other) - at)
        )

        assert common(key_of(edge), key_of(other), at) == expected
        assert length(key_of(other)) == len(other)
        assert part(key_of(other), at, len(other)) == key_of(other[at:])


def test_a_token_shares_no_byte_with_its_neighbour() -> None:
    """Tokens that agree in some of their bytes do not count as equal in part."""
    assert common(key_of([0x01020304, 7]), key_of([0x01020305, 7]), 0) == 0
    assert common(key_of([7, 0x0102FF04]), key_of([7, 0x0102FE04]), 0) == 1


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_beyond_32_bits_is_refused(token: int) -> None:
    """A key never holds another token than the one it was made of."""
    with pytest.raises(OverflowError):
        key_of([1, token])


def test_prefix_lookahead_0(stand: Stand) -> None:
    """A = 1..8 that generated 20, 21 is held to 20; B = 1..5, 10, 11, 12 has 3 tokens left."""
    stand.put(*A, 20)
    prompt = key_of((1, 2, 3, 4, 5, 10, 11, 12))

    match = stand.trie.match(prompt, limit=7)

    assert match.count == 5
    assert length(prompt) - match.count == 3
    (held,) = match.parts(Kind.STANDARD)
    assert (held.start, held.held[:5]) == (0, tags(Kind.STANDARD, (1, 2, 3, 4, 5), 0))


def test_prefix_lookahead_0_of_states(hybrid: Stand) -> None:
    """The same where states cannot follow: all 8 are left, and the branch at 5 is known."""
    hybrid.put(*A, 20)

    match = hybrid.trie.match(key_of((1, 2, 3, 4, 5, 10, 11, 12)), limit=7)

    assert [state.stop for state in match.parts(Kind.RECURRENT) if state.stop <= match.count] == []
    assert match.count == 5, "where to capture a state for whoever shares as much"

    hybrid.put(1, 2, 3, 4, 5)
    again = hybrid.trie.match(key_of((1, 2, 3, 4, 5, 10, 11, 12)), limit=7)
    assert [state.stop for state in again.parts(Kind.RECURRENT)] == [5]


def test_repeat_1_to_5(stand: Stand) -> None:
    """A repeated prompt 1..5 matches 4 tokens at most: one is always left to evaluate."""
    stand.put(1, 2, 3, 4, 5)

    assert stand.match(1, 2, 3, 4, 5, limit=4) == 4
    assert stand.ends() == {(1, 2, 3, 4, 5)}, "a look-up changes nothing"


def test_repeat_1_to_5_of_states(hybrid: Stand) -> None:
    """A repeated prompt without a capture in it has all 5 left and is pending at 4."""
    hybrid.put(1, 2, 3, 4, 5)

    match = hybrid.trie.match(key_of((1, 2, 3, 4, 5)), limit=4)

    assert [state.stop for state in match.parts(Kind.RECURRENT)] == [5], "beyond what is wanted"
    assert match.count == 4


def test_fault_12_a_match_inside_an_edge_is_exact(stand: Stand) -> None:
    """However a prompt departs from a long edge, its match ends at that very token."""
    tokens = tuple(range(100, 160))
    stand.put(*tokens)

    for at in range(60):
        assert stand.match(*tokens[:at], 7, 8) == at
        assert stand.match(*tokens[:at]) == at
        assert stand.match(*tokens, limit=at) == at


def test_fault_5_a_capture_behind_a_branch_spans_its_edge(stand: Stand) -> None:
    """A row restored part of the way that branches off leaves no snapshot short of its edge."""
    stand.put(*range(40))
    stand.put(*range(25), 90, 91, 92, start=10)

    assert stand.ends() == {tuple(range(25)), tuple(range(40)), (*range(25), 90, 91, 92)}
    assert stand.match(*range(25), 90, 91, 92) == 28
    match = stand.trie.match(key_of((*range(25), 90, 91, 92)))
    held = [tag for snapshot in match.parts(Kind.STANDARD) for tag in snapshot.held]
    assert tuple(held) == tags(Kind.STANDARD, (*range(25), 90, 91, 92), 0)


def test_fault_5_47k_tokens_of_which_46k_match() -> None:
    """A long prompt that departs near its end keeps all that it shares."""
    stand = Stand(edge_tokens=EDGE_TOKENS_MAX)
    tokens = tuple(range(47_000))
    snapshot = Snapshot(stand.book, Kind.STANDARD, 0, len(tokens), tokens)
    stand.trie.insert(key_of(tokens), {Kind.STANDARD: snapshot})

    match = stand.trie.match(key_of((*tokens[:46_000], *tokens[:1000])))

    assert match.count == 46_000
    held = [tag for snapshot in match.parts(Kind.STANDARD) for tag in snapshot.held]
    assert tuple(held[:46_000]) == tokens[:46_000]


def test_nothing_is_kept_without_a_snapshot(stand: Stand) -> None:
    """An end where no tokens are kept makes no node: there would be nothing in it."""
    assert stand.trie.insert(key_of(A), {}) is None
    assert stand.ends() == set()


def test_a_state_keeps_its_node(hybrid: Stand) -> None:
    """States stay at the end of the node they were taken at, through a split and an extension."""
    hybrid.put(1, 2, 3, 4)
    hybrid.put(*A)
    hybrid.put(1, 2, 50)

    states = {tokens_of(n) for n in hybrid.trie.nodes() if Kind.RECURRENT in n.snapshots}
    assert states == {(1, 2, 3, 4), A, (1, 2, 50)}
    assert hybrid.ends() == states | {(1, 2)}


def test_the_first_state_of_a_node_stays(hybrid: Stand) -> None:
    """What a node has is kept and what comes again is closed."""
    node = hybrid.put(*A)
    first = dict(node.snapshots)
    again = hybrid.put(*A, start=0)

    assert again is node
    assert node.snapshots == first


def test_a_row_whose_beginning_was_evicted_keeps_nothing(stand: Stand) -> None:
    """A capture that does not reach back to what the trie has could never be restored."""
    stand.put(*A)
    stand.trie.evict(0)

    assert put(stand.trie, stand.book, (*A, 9, 10), start=8) is None
    assert stand.book.live == 0


def test_a_snapshot_must_end_with_its_key(stand: Stand) -> None:
    """A snapshot of other tokens than the key's is a bug of the caller, who keeps it."""
    snapshot = stand.book.take(Kind.STANDARD, A)

    for key in (key_of(A[:5]), Key(b"")):
        with pytest.raises(TrieError):
            stand.trie.insert(key, {Kind.STANDARD: snapshot})
    with pytest.raises(TrieError):
        stand.trie.insert(key_of(A), {Kind.RECURRENT: stand.book.take(Kind.RECURRENT, A)})

    assert stand.book.live == 2
    for left in tuple(stand.book.open):
        left.close()


def test_no_edge_is_longer_than_the_bound(short: Stand) -> None:
    """A long run is cut at multiples of the bound, so that one can go without the others."""
    short.put(*range(50))

    assert {len(tokens) for tokens in short.ends()} == {16, 32, 48, 50}
    short.put(*range(53))
    assert {len(tokens) for tokens in short.ends()} == {16, 32, 48, 53}
    short.trie.evict(20 * NBYTES[Kind.STANDARD])
    assert short.ends() == {tuple(range(16))}


def test_an_insert_merges_what_no_row_holds_any_longer(stand: Stand) -> None:
    """Owned and lazy nodes stay two; once both are owned the next insert makes them one."""
    stand.put(*A[:4])
    stand.put(*A, lazy=True)
    assert stand.ends() == {A[:4], A}
    next(s for s in stand.book.open if s.lazy).materialise()

    node = stand.put(*A[:4])

    assert stand.ends() == {A}
    assert [node] == list(stand.trie.nodes()), "the node returned is one of the trie"
