"""What is put ahead of a row, layer by layer: nothing until the row is moved there, then all."""

from __future__ import annotations

from copy import deepcopy

import pytest

from mlxd_worker.cache.base import Kind, RowError, RowId
from mlxd_worker.cache.kept.stacks import LayerState, clip
from tests.worker.cache.keeping import copy_out, snapshots_of
from tests.worker.cache.pair import Pair, pair
from tests.worker.cache.subjects import SUBJECTS, Subject

SLICED = [s for s in SUBJECTS if all(kind.sliceable for kind in s.kinds)]
SOURCE_TOKENS, MIDDLE = 96, 64
States = dict[Kind, dict[int, LayerState]]


@pytest.fixture(params=SLICED, ids=lambda subject: subject.name)
def held(request: pytest.FixtureRequest) -> Pair:
    """The caches of a subject with one row of some length."""
    subject: Subject = request.param
    new = pair(subject)
    row = new.join(SOURCE_TOKENS)
    assert row is not None
    new.append([row], SOURCE_TOKENS)
    return new


def states_of(held: Pair, row: RowId, start: int, stop: int) -> States:
    """Return what a row's layers hold of [start, stop), as memory of their own."""
    states: States = {}
    for kind, snapshot in snapshots_of(held.caches.contents, row, 0).items():
        copy_out(snapshot)
        states[kind] = {
            number: clip(state, start, stop) for number, state in enumerate(snapshot.layers)
        }
        snapshot.close()
    return states


def put(held: Pair, row: RowId, start: int, states: States) -> None:
    """Put all of it ahead of a row, one layer after another."""
    for kind, layers in states.items():
        for number, state in layers.items():
            held.caches.contents.put_ahead(row, kind, start, {number: state})


def join_another(held: Pair) -> tuple[RowId, RowId]:
    """Return the row that is there, and a new one."""
    (first,) = held.rows
    second = held.join(SOURCE_TOKENS + 40)
    assert second is not None
    return first, second


def test_a_row_moves_on_to_what_was_put_ahead(held: Pair) -> None:
    """In two goes: it then reads what the row does that this was taken of."""
    first, second = join_another(held)
    contents = held.caches.contents
    for start, stop in ((0, MIDDLE), (MIDDLE, SOURCE_TOKENS)):
        put(held, second, start, states_of(held, first, start, stop))
        assert contents.is_ahead(second)
        assert contents.offset(second) == start
        assert contents.restore(second, (), stop)
        assert not contents.is_ahead(second)
    held.rows[second].history = deepcopy(held.rows[first].history)

    held.append([second], 7)
    held.append([first, second], 1)
    held.end()


def test_several_goes_before_the_row_moves(held: Pair) -> None:
    """As where it can stand at the end alone."""
    first, second = join_another(held)
    contents = held.caches.contents
    for start, stop in ((0, MIDDLE), (MIDDLE, SOURCE_TOKENS)):
        put(held, second, start, states_of(held, first, start, stop))
    assert not contents.restore(second, (), MIDDLE), "its layers are further"
    assert contents.restore(second, (), SOURCE_TOKENS)
    held.rows[second].history = deepcopy(held.rows[first].history)

    held.append([first, second], 1)
    held.end()


def test_a_row_moves_nowhere_before_all_layers_are_there(held: Pair) -> None:
    """Nor does it take what is missing from anywhere else; its own pass takes its place."""
    first, second = join_another(held)
    contents = held.caches.contents
    states = states_of(held, first, 0, MIDDLE)
    kind = next(iter(states))
    del states[kind][0]
    put(held, second, 0, states)
    assert not contents.restore(second, (), MIDDLE)
    assert contents.offset(second) == 0

    held.append([second], 5)
    assert not contents.is_ahead(second)
    held.append([first, second], 1)
    held.end()


def test_nothing_is_put_behind_a_gap(held: Pair) -> None:
    """Nor ahead of a row that is not there."""
    first, second = join_another(held)
    contents = held.caches.contents
    states = states_of(held, first, MIDDLE, SOURCE_TOKENS)
    with pytest.raises(RowError, match="nothing goes to"):
        put(held, second, MIDDLE, states)
    with pytest.raises(RowError, match="not known"):
        put(held, RowId(99), 0, states)
    assert not contents.is_ahead(second)
    held.append([second], 3)
    held.end()
