"""What a candidate is worth, and the order in which nodes go."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from mlxd_worker.cache.prefix.eviction import RERANK_REQUESTS, Candidate, Ranking, reuse_value
from mlxd_worker.cache.prefix.trie import PrefixTrie
from mlxd_worker.cache.prefix.trie_node import Key, Node, key_of
from tests.worker.cache.trie_model import NBYTES, Kind, Snapshot, Stand, remove

TOKEN_NBYTES = NBYTES[Kind.STANDARD]
A = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("kinds", [(Kind.STANDARD,), (Kind.STANDARD, Kind.RECURRENT)])
def test_only_what_can_go_is_judged(kinds: tuple[Kind, ...]) -> None:
    """A policy is asked about leaves and about nodes with states, and about nothing else."""
    verdicts: list[bool] = []

    def ask(candidate: Candidate[Kind, Snapshot]) -> float:
        whole = [kind for kind in candidate.node.snapshots if not kind.sliceable]
        verdicts.append(bool(whole) or not candidate.node.children)
        return reuse_value(candidate)

    stand = Stand(*kinds, edge_tokens=4)
    stand.trie = PrefixTrie(kinds, stand.book.merge, value=ask, edge_tokens=4)
    stand.put(*A)
    stand.put(*A, 9)
    stand.put(1, 2, 7)

    stand.trie.evict(stand.trie.nbytes - 1)
    stand.trie.evict(0)

    assert verdicts
    assert all(verdicts)


def rank(worth: dict[int, float], *, stops: dict[int, int] | None = None) -> (
    tuple[Ranking[Kind, Snapshot], dict[Node[Kind, Snapshot], int]]
):  # fmt: skip
    """Return a ranking of named nodes that are worth what `worth` says at the time."""
    names: dict[Node[Kind, Snapshot], int] = {}
    ranking: Ranking[Kind, Snapshot] = Ranking(lambda node: worth[names[node]], rerank_requests=64)
    for name in worth:
        node: Node[Kind, Snapshot] = Node(None, key_of(range((stops or {}).get(name, 1))), 0)
        names[node] = name
        ranking.note(node)
    return ranking, names


def test_who_has_risen_since_is_passed_over() -> None:
    """A node's worth counts as of now when its turn comes, though nobody noted that it rose."""
    worth = {1: 1.0, 2: 2.0, 3: 3.0}
    ranking, names = rank(worth)
    worth[1] = 2.5

    assert names[ranking.least()] == 2


def test_of_equals_the_deepest_goes_first() -> None:
    """Where the worth decides nothing, the end of a long prompt goes before a short one."""
    ranking, names = rank({1: 1.0, 2: 1.0, 3: 1.0}, stops={1: 5, 2: 9, 3: 7})

    assert names[ranking.least()] == 2


def crowd(value: Callable[[Candidate[Kind, Snapshot]], float]) -> Stand:
    """Return so many prompts of 3 tokens that not all of them are ranked for each request."""
    stand = Stand()
    stand.trie = PrefixTrie(stand.kinds, stand.book.merge, value=value)
    for chat in range(100):
        stand.put(chat, 1, 2)
    stand.use()
    stand.trie.evict(99 * 3 * TOKEN_NBYTES)
    return stand


def test_a_use_may_lower_what_a_node_is_worth() -> None:
    """A policy that lets go of what was used is obeyed at once."""
    stand = crowd(lambda candidate: -candidate.uses)
    stand.use(50, 1, 2)

    (gone,) = stand.trie.evict(stand.trie.nbytes - 1)

    assert gone.key == key_of((50, 1, 2))


def test_a_merge_may_lower_what_a_node_is_worth() -> None:
    """A node that has become one with its parent is judged as the larger one it is."""
    stand = crowd(lambda candidate: -candidate.nbytes)
    stand.put(200, 1, 3, 3)
    sibling = stand.put(200, 1, 4, 4)
    for _ in range(10):
        stand.use()
    stand.trie.evict(stand.trie.nbytes - 1)
    remove(stand.trie, sibling)

    (gone,) = stand.trie.evict(stand.trie.nbytes - 1)

    assert gone.key == key_of((200, 1, 3, 3))


def test_copying_out_may_lower_what_a_node_is_worth() -> None:
    """A lazy node is judged anew when it comes to own its bytes."""
    stand = crowd(lambda candidate: -candidate.nbytes)
    stand.put(200, 1, 2, 3, lazy=True)
    next(snapshot for snapshot in stand.book.open if snapshot.lazy).materialise()

    (gone,) = stand.trie.evict(stand.trie.nbytes - 1)

    assert gone.key == key_of((200, 1, 2, 3))


def test_an_old_ranking_still_knows_what_was_used_since(stand: Stand) -> None:
    """Between two rankings of everything, a use counts at once, and so does what is new."""
    for chat in range(5):
        stand.put(chat, 1)
    for chat in (0, 2, 0, 2):
        stand.use(chat, 1)
    stand.put(9, 1)

    stand.trie.evict(3 * 2 * TOKEN_NBYTES)

    assert stand.ends() == {(0, 1), (2, 1), (9, 1)}


def test_what_grew_old_goes_after_a_new_ranking(stand: Stand) -> None:
    """Many uses long ago weigh less than one use lately, once everything is reckoned anew."""
    stand.put(1, 1)
    for _ in range(5):
        stand.use(1, 1)
    stand.put(2, 2)
    for _ in range(RERANK_REQUESTS):
        stand.use(7)
    stand.use(2, 2)
    stand.put(3, 3)
    stand.use()

    stand.trie.evict(2 * 2 * TOKEN_NBYTES)

    assert stand.ends() == {(2, 2), (3, 3)}


def test_a_ranking_stays_small_without_an_eviction() -> None:
    """Uses under a budget that is never exceeded leave no trace behind."""
    ranking: Ranking[Kind, Snapshot] = Ranking(lambda _: 1.0, rerank_requests=64)
    nodes: list[Node[Kind, Snapshot]] = [Node(None, Key(b""), 0) for _ in range(10)]
    for turn in range(10_000):
        ranking.note(nodes[turn % 10])

    assert len(ranking._heap) <= 100
    assert ranking.least() in nodes


def candidate(*, gain: int = 10, nbytes: int = 100, uses: int = 1, idle: int = 5) -> (
    Candidate[Kind, Snapshot]
):  # fmt: skip
    """Return one that is like another but for what is named."""
    node: Node[Kind, Snapshot] = Node(None, Key(b""), 0)
    return Candidate(node, gain, nbytes, uses, idle)


def test_worth_follows_use_age_gain_and_size() -> None:
    """More uses and tokens make a candidate worth more; more bytes and idle time, less."""
    plain = reuse_value(candidate())

    assert reuse_value(candidate(uses=2)) > plain
    assert reuse_value(candidate(gain=11)) > plain
    assert reuse_value(candidate(nbytes=101)) < plain
    assert reuse_value(candidate(idle=6)) < plain
    assert reuse_value(candidate(nbytes=0)) == math.inf
    assert reuse_value(candidate(gain=0)) == 0
