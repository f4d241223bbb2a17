"""How far snapshots on a path bring all kinds at once, and the memory of what was evicted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.prefix import evicted
from mlxd_worker.cache.prefix.evicted import EvictedRuns
from mlxd_worker.cache.prefix.lookup import Target, best_target
from mlxd_worker.cache.prefix.trie_node import key_of, part

WINDOW = 8
S, Q, R, X = Kind.STANDARD, Kind.QUANTIZED, Kind.ROTATING, Kind.RECURRENT


@dataclass(frozen=True, slots=True)
class Piece:
    """A snapshot that is only its name."""

    kind: Kind
    start: int
    stop: int


def node(start: int, stop: int, *kinds: Kind) -> dict[Kind, Piece]:
    """Return what a node of [start, stop) holds."""
    return {kind: Piece(kind, start, stop) for kind in kinds}


def rewinds(kind: Kind, offset: int, target: int) -> bool:
    """A window goes back while it has not wrapped, a recurrent state never."""
    return kind is R and target <= offset <= WINDOW


def find(path: list[dict[Kind, Piece]], limit: int, *kinds: Kind) -> Target[Piece]:
    """Return the best target."""
    return best_target(path, limit, kinds=kinds, rewinds=rewinds)


@pytest.mark.parametrize("limit", [1, 5, 6, 9])
def test_standard_layers_follow_to_the_exact_token(limit: int) -> None:
    """What can be cut is cut where the match ends, also inside a node (fault 12)."""
    path = [node(0, 5, S), node(5, 9, S)]

    target = find(path, limit, S)
    assert target.offset == limit
    assert target.parts == tuple(n[S] for n in path if n[S].start < limit)


def test_a_gap_ends_what_can_be_cut() -> None:
    """A node without a snapshot hides everything below it."""
    path = [node(0, 5, S), {}, node(7, 9, S)]
    assert find(path, 9, S) == Target(5, (path[0][S],))


def test_a_recurrent_state_stands_for_one_length() -> None:
    """The deepest state not beyond the match counts, and the keys are cut to it."""
    path = [node(0, 5, S, X), node(5, 9, S), node(9, 12, S, X)]
    assert find(path, 11, S, X) == Target(5, (path[0][S], path[0][X]))
    assert find(path, 12, S, X).offset == 12
    assert find(path, 4, S, X) == Target(0, ())


def test_all_kinds_end_at_one_offset() -> None:
    """The smallest reach over the kinds decides, and no kind is brought further."""
    path = [node(0, 3, S, R, X), node(3, 6, S, R), node(6, 8, S, X), node(8, 20, S, R, X)]
    assert find(path, 20, S, R, X).offset == 20
    assert find(path, 7, S, R, X).offset == 3
    assert find(path[:3], 8, S, R, X).offset == 3
    assert find([*path[:1], {}], 20, S, R, X).offset == 3


def test_an_unwrapped_window_goes_back_by_itself() -> None:
    """A window that has not wrapped serves any length before it; one that has, its own alone."""
    early, late = node(0, 7, S, R), node(7, 20, S, R)
    assert find([early, late], 5, S, R) == Target(5, (early[S], early[R]))
    assert find([late], 5, R) == Target(0, ())
    assert find([early, late], 12, R).offset == 7
    assert find([early, late], 20, R) == Target(20, (late[R],))


def test_nothing_is_found_on_an_empty_path() -> None:
    """Without snapshots, or where no token may be reused, the row starts at 0."""
    assert find([], 9, S, R, X) == Target(0, ())
    assert find([], 9, R) == Target(0, ())
    assert find([node(0, 5, S)], 0, S) == Target(0, ())


def runs_of(*runs: Iterable[int]) -> EvictedRuns:
    """Return a memory of `runs`, evicted in this order."""
    memory = EvictedRuns()
    for run in runs:
        memory.remember(key_of(list(run)))
    return memory


def test_evicted_runs_are_remembered_to_the_token() -> None:
    """A prompt is told how much of it was there once, from its beginning on."""
    memory = runs_of((1, 2, 3, 4), (1, 2, 9))

    prompts: list[tuple[int, ...]] = [(), (5,), (1,), (1, 2, 3, 7), (1, 2, 3, 4, 5), (1, 2, 9, 9)]
    assert [memory.match(key_of(prompt)) for prompt in prompts] == [0, 0, 1, 3, 4, 3]


def test_a_run_inside_another_is_remembered_once() -> None:
    """Leaf after leaf, an evicted conversation is one run, whatever comes first."""
    memory = runs_of(*(range(length) for length in (3, 5, 4)))
    assert (len(memory), memory.tokens) == (1, 5)


def test_the_memory_of_what_was_evicted_is_bounded() -> None:
    """The oldest runs are forgotten, by number and by tokens; a huge one is cut."""
    memory = runs_of(*((first, 1) for first in range(evicted.RUNS_MAX + 1)))
    assert len(memory) == evicted.RUNS_MAX
    assert [memory.match(key_of((first, 1))) for first in (0, 1)] == [0, 2]

    memory.remember(key_of(range(evicted.TOKENS_MAX + 1)))
    assert (len(memory), memory.tokens) == (1, evicted.TOKENS_MAX)


def test_an_evicted_state_is_remembered_for_its_own_length() -> None:
    """The state at the end of some tokens went: whoever begins with all of them is told so."""
    memory = EvictedRuns()
    memory.remember(key_of((1, 2, 3)), states_only=True)

    assert memory.had_state(key_of((1, 2, 3, 4)), beyond=2)
    assert not memory.had_state(key_of((1, 2, 3, 4)), beyond=3)
    assert not memory.had_state(key_of((1, 2, 4, 4)), beyond=0)
    assert not memory.had_state(key_of((1, 2, 3)), beyond=0)
    assert memory.match(key_of((1, 2, 3))) == 0


def test_states_of_many_lengths_are_told_apart() -> None:
    """Each remembered state answers for its own beginning, beside longer and other ones."""
    memory, key = EvictedRuns(), key_of(range(1000))
    for end in (900, 300, 600):
        memory.remember(part(key, 0, end), states_only=True)
    memory.remember(key_of((*range(949), 7)), states_only=True)

    assert [memory.had_state(key, beyond=n) for n in (0, 300, 600, 899, 900)] == [True] * 4 + [
        False
    ]
    assert memory.had_state(part(key, 0, 301), beyond=0)
    assert not memory.had_state(part(key, 0, 300), beyond=0)
