"""The recurrent cache by itself: whose states are read and written, and what stays in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlxd_worker.cache.base import ArenaId, Kind, Place, RowError
from mlxd_worker.cache.plan import Chunk, Group, StepPlan
from mlxd_worker.cache.recurrent import RecurrentCache, RowState
from tests.worker.tiny import floats

TAIL = RowState("tail", (3, 10), mx.float16)
STATE = RowState("state", (2, 4, 5), mx.float32)
FIRST, SECOND = ArenaId(1), ArenaId(2)
SLACK_NBYTES = 16 << 10
"""Index arrays and what a batch leaves behind."""
EARLIER_NBYTES = 2 << 20
"""What other work of the step takes, well below an arena of this test."""


def opened(*, slots: int = 4) -> RecurrentCache:
    """Return a cache with two arenas."""
    cache = RecurrentCache((TAIL, STATE))
    cache.open(FIRST, capacity=256, slots=slots)
    cache.open(SECOND, capacity=1024, slots=slots)
    return cache


def place(arena: ArenaId, slot: int) -> Place:
    """Return a place."""
    return Place(arena=arena, capacity=256 if arena == FIRST else 1024, slot=slot)


def one_row(at: Place, *, width: int = 7) -> StepPlan:
    """Return the plan of a chunk."""
    start = mx.array([at.slot, 0], dtype=mx.int32)
    chunk = Chunk(arena=at.arena, capacity=at.capacity, slot=at.slot, length=width, start=start)
    return plan_of(width=width, chunk=chunk, groups=(), member_order=None)


def batch(places: Sequence[Place]) -> StepPlan:
    """Return the plan of a decode step of the rows at `places`, in that order."""
    groups, seen = [], []
    for arena in sorted({at.arena for at in places}):
        members = [index for index, at in enumerate(places) if at.arena == arena]
        members.sort(key=lambda index: places[index].slot)
        seen += members
        slots = [places[index].slot for index in members]
        in_order = members == list(range(members[0], members[0] + len(members)))
        groups.append(
            Group(
                arena=arena,
                capacity=places[members[0]].capacity,
                members=None if in_order else mx.array(members, dtype=mx.int32),
                queriers=None,
                first=members[0],
                count=len(members),
                slots_used=slots[-1] + 1,
                span=256,
                write_slots=mx.array(slots, dtype=mx.int32).reshape(-1, 1),
                write_positions=mx.zeros((len(slots), 1), dtype=mx.int32),
                last_visible=mx.zeros((slots[-1] + 1, 1), dtype=mx.int32),
            )
        )
    order = [seen.index(index) for index in range(len(places))]
    ordered = order == list(range(len(places)))
    member_order = None if ordered else mx.array(order, dtype=mx.int32)
    return plan_of(width=1, chunk=None, groups=tuple(groups), member_order=member_order)


def plan_of(
    *, width: int, chunk: Chunk | None, groups: tuple[Group, ...], member_order: mx.array | None
) -> StepPlan:
    """Return a plan for a cache that does not attend."""
    return StepPlan(
        width=width,
        dtype=mx.float32,
        chunk=chunk,
        groups=groups,
        order=None,
        member_order=member_order,
        bounded_shapes=False,
    )


def filled(values: Sequence[float]) -> tuple[mx.array, mx.array]:
    """Return states of as many rows, each full of its value."""
    column = mx.array(list(values), dtype=mx.float32)
    made = [
        mx.broadcast_to(
            column.reshape(-1, *[1] * len(state.shape)), (len(values), *state.shape)
        ).astype(state.dtype)
        for state in (TAIL, STATE)
    ]
    return made[0], made[1]


def put(cache: RecurrentCache, plan: StepPlan, values: Sequence[float]) -> None:
    """Write states full of `values` and evaluate."""
    cache.put(plan, filled(values))
    mx.eval(list(cache.arrays().values()))


def values_at(cache: RecurrentCache, at: Place) -> set[float]:
    """Return the values that occur in what the row at `at` holds."""
    return {value for array in cache.read(at, 0, 1) for value in floats(array.flatten())}


def test_a_fresh_row_finds_zeros_of_the_declared_types() -> None:
    """Before its first token, a row's states are zero, each of its own shape and type."""
    for plan, rows in ((one_row(place(FIRST, 2)), 1), (batch([place(SECOND, 1)]), 1)):
        tail, state = opened().states(plan)

        assert (tail.shape, tail.dtype) == ((rows, *TAIL.shape), mx.float16)
        assert (state.shape, state.dtype) == ((rows, *STATE.shape), mx.float32)
        assert not mx.any(tail).item()
        assert not mx.any(state).item()


def test_states_come_and_go_in_the_batchs_order() -> None:
    """Whatever arenas, slots and order: each batch row reads and writes its own row's states."""
    cache = opened()
    places = [place(SECOND, 3), place(FIRST, 2), place(SECOND, 0), place(FIRST, 0)]

    put(cache, batch(places), [1, 2, 3, 4])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3], [2, 0, 3], [1]):
        tail, state = cache.states(batch([places[index] for index in order]))

        assert floats(tail[:, 0, 0]) == [index + 1 for index in order]
        assert floats(state[:, 1, 3, 4]) == [index + 1 for index in order]
    for index, at in enumerate(places):
        assert floats(cache.states(one_row(at))[1][:, 0, 0, 0]) == [index + 1]


@pytest.mark.parametrize("single", [True, False])
def test_rows_that_are_not_in_the_batch_keep_theirs(single: bool) -> None:
    """A pass over some rows of an arena leaves the states of all others as they were."""
    cache = opened()
    rows = [place(FIRST, slot) for slot in range(4)]
    put(cache, batch(rows), [1, 2, 3, 4])

    if single:
        put(cache, one_row(rows[2]), [9])
    else:
        put(cache, batch([rows[2], rows[0]]), [9, 8])

    expected = [1, 2, 9, 4] if single else [8, 2, 9, 4]
    assert [values_at(cache, at) for at in rows] == [{value} for value in expected]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_writes_in_place(rows: int) -> None:
    """A pass over a few rows of a big arena never takes the memory of a second arena."""
    big = RowState("state", (64, 64), mx.float32)
    cache = RecurrentCache((big,))
    cache.open(FIRST, capacity=256, slots=256)
    places = [place(FIRST, 17 * (index + 1)) for index in range(rows)]
    plan = one_row(places[0]) if rows == 1 else batch(places)
    row_nbytes = cache.slot_nbytes(256)
    for _ in range(3):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        # The queue has work before this layer's: a lazy read would still be waiting behind it.
        earlier = mx.sum(mx.sin(mx.full((1, 64), 0.5) @ mx.full((64, 1 << 12), 0.5)))
        (state,) = cache.states(plan)
        mixed = earlier + mx.sum(mx.sin(state), axis=-1, keepdims=True) + 0.5 * state
        cache.put(plan, (mixed,))
        del state, mixed, earlier
        mx.eval(list(cache.arrays().values()))

        assert mx.get_peak_memory() - before <= 8 * rows * row_nbytes + EARLIER_NBYTES
        assert abs(mx.get_active_memory() - before) <= SLACK_NBYTES


def test_nothing_of_the_step_stays_alive_with_its_state() -> None:
    """A state that is a view of a large activation is copied: the activation's memory returns."""
    cache = opened()
    for width, at in ((4096, place(FIRST, 0)), (2048, place(SECOND, 1))):
        before = mx.get_active_memory()
        activations = mx.random.normal((1, width, *TAIL.shape[1:])).astype(mx.float16)
        state = mx.random.normal((1, 100, *STATE.shape))[:, -1]
        cache.put(one_row(at, width=width), (activations[:, -TAIL.shape[0] :], state))
        mx.eval(list(cache.arrays().values()))
        kept = cache.read(at, 0, width)
        mx.eval(kept)
        assert mx.array_equal(kept[0], activations[:, -TAIL.shape[0] :])
        del activations, state, kept

        assert abs(mx.get_active_memory() - before) <= SLACK_NBYTES


def test_what_is_read_is_a_copy_of_its_own() -> None:
    """States that were read keep their values, and their memory only, whatever the row does."""
    before = mx.get_active_memory()
    cache = opened(slots=512)
    at = place(FIRST, 100)
    put(cache, one_row(at), [5])
    kept = cache.read(at, 0, 1)
    mx.eval(kept)

    put(cache, one_row(at), [6])
    cache.close(FIRST)
    cache.close(SECOND)

    assert mx.get_active_memory() - before <= cache.slot_nbytes(256) + SLACK_NBYTES
    assert {value for array in kept for value in floats(array.flatten())} == {5}


def test_a_written_state_is_the_one_that_was_read() -> None:
    """What was read of one row can be put into another, in another arena."""
    cache = opened()
    put(cache, batch([place(FIRST, 1), place(FIRST, 3)]), [2, 7])

    cache.write(place(SECOND, 2), 0, 40, cache.read(place(FIRST, 3), 0, 40))

    assert values_at(cache, place(SECOND, 2)) == {7}
    assert values_at(cache, place(FIRST, 3)) == {7}
    assert values_at(cache, place(FIRST, 1)) == {2}


def test_a_row_moves_whole_and_a_cleared_slot_is_zero() -> None:
    """A move takes all states along; a slot that held NaN is clean for the next row."""
    cache = opened()
    put(cache, batch([place(FIRST, 0), place(FIRST, 2)]), [3, math.nan])

    cache.move(place(FIRST, 0), place(SECOND, 3))
    cache.clear(place(FIRST, 2))

    assert values_at(cache, place(SECOND, 3)) == {3}
    assert values_at(cache, place(FIRST, 2)) == {0}


def test_a_row_stands_only_where_it_stands() -> None:
    """No token can be taken back from a state, not even the last one."""
    cache = opened()

    assert cache.rewinds(7, 7)
    assert not cache.rewinds(7, 6)
    assert not cache.rewinds(7, 0)


def test_the_bytes_are_exact_and_do_not_grow_with_the_capacity() -> None:
    """A slot takes the states' bytes whatever its capacity; what is closed takes none."""
    cache = opened(slots=4)
    slot_nbytes = 3 * 10 * 2 + 2 * 4 * 5 * 4

    assert cache.slot_nbytes(256) == cache.slot_nbytes(1 << 20) == slot_nbytes
    assert cache.nbytes == 2 * 4 * slot_nbytes
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
    assert len(cache.arrays()) == 4
    cache.close(FIRST)
    assert cache.nbytes == 4 * slot_nbytes
    cache.close(SECOND)
    assert cache.nbytes == 0
    assert cache.kind is Kind.RECURRENT


@pytest.mark.parametrize("single", [True, False])
def test_states_of_another_form_are_refused(single: bool) -> None:
    """A wrong number, shape, row count or type of states is an error, and nothing is written."""
    cache = opened()
    rows = [place(FIRST, 1)] if single else [place(FIRST, 1), place(SECOND, 1)]
    plan = one_row(rows[0]) if single else batch(rows)
    tail, state = filled([4] * len(rows))
    wrong = [
        (tail,),
        (tail, state, state),
        (state, tail),
        (tail, state[:, :1]),
        (tail, mx.concatenate([state, state])),
        (tail.astype(mx.bfloat16), state),
        (tail, state.astype(mx.float16)),
    ]

    for states in wrong:
        with pytest.raises(RowError, match=r"stat|tail"):
            cache.put(plan, states)
    with pytest.raises(RowError, match="state"):
        cache.write(rows[0], 0, 1, (tail[:1], state[:1].astype(mx.bfloat16)))

    assert all(values_at(cache, at) == {0} for at in rows)
