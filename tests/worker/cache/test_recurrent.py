"""The recurrent cache by itself: whose states are read and written, and what stays in memory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_worker.cache.arenas.plan import Chunk, StepPlan
from mlxd_worker.cache.base import ArenaId, Kind, Place, RowError, RowId
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.cache.rows import RowCaches
from tests.support.effort import SAME_EACH_TIME, examples
from tests.support.mlx_memory import live_nbytes
from tests.worker.tiny import floats

TAIL = RowState("tail", (3, 10), mx.float16)
STATE = RowState("state", (2, 4, 5), mx.float32)
FIRST, SECOND = ArenaId(1), ArenaId(2)
SLACK_NBYTES = 16 << 10
"""Index arrays and what a batch leaves behind."""


def cache_of() -> RecurrentCache:
    """Return an empty cache."""
    return RecurrentCache((TAIL, STATE))


def place(arena: ArenaId, slot: int) -> Place:
    """Return a place."""
    return Place(arena=arena, capacity=256 if arena == FIRST else 1024, slot=slot)


def one_row(at: Place, *, width: int = 7) -> StepPlan:
    """Return the plan of a chunk."""
    start = mx.array([at.slot, 0], dtype=mx.int32)
    chunk = Chunk(arena=at.arena, capacity=at.capacity, slot=at.slot, length=width, start=start)
    return plan_of((at,), width=width, chunk=chunk)


def batch(places: Sequence[Place]) -> StepPlan:
    """Return the plan of a decode step of the rows at `places`, in that order."""
    return plan_of(tuple(places), width=1, chunk=None)


def plan_of(places: tuple[Place, ...], *, width: int, chunk: Chunk | None) -> StepPlan:
    """Return a plan for a cache that does not attend."""
    return StepPlan(
        width=width,
        dtype=mx.float32,
        chunk=chunk,
        groups=(),
        order=None,
        places=places,
        bounded_shapes=False,
    )


def filled_states(values: Sequence[float]) -> tuple[mx.array, mx.array]:
    """Return states of as many rows, each full of its value."""
    column = mx.array(list(values), dtype=mx.float32)
    arrays = [
        mx.broadcast_to(
            column.reshape(-1, *[1] * len(state.shape)), (len(values), *state.shape)
        ).astype(state.dtype)
        for state in (TAIL, STATE)
    ]
    return arrays[0], arrays[1]


def put(cache: RecurrentCache, plan: StepPlan, values: Sequence[float]) -> None:
    """Write states full of `values` and evaluate."""
    cache.put(plan, filled_states(values))
    mx.eval(list(cache.arrays().values()))


def values_at(cache: RecurrentCache, at: Place) -> set[float]:
    """Return the values that occur in what the row at `at` holds."""
    return {value for array in cache.read(at, 0, 1) for value in floats(array.flatten())}


def test_a_fresh_row_finds_zeros_of_the_declared_types() -> None:
    """Before its first token, a row's states are zero, each of its own shape and type."""
    for plan, rows in ((one_row(place(FIRST, 2)), 1), (batch([place(SECOND, 1)]), 1)):
        tail, state = cache_of().states(plan)

        assert (tail.shape, tail.dtype) == ((rows, *TAIL.shape), mx.float16)
        assert (state.shape, state.dtype) == ((rows, *STATE.shape), mx.float32)
        assert not mx.any(tail).item()
        assert not mx.any(state).item()


def test_states_come_and_go_in_the_batchs_order() -> None:
    """Whatever arenas, slots and order: each batch row reads and writes its own row's states."""
    cache = cache_of()
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
    cache = cache_of()
    rows = [place(FIRST, slot) for slot in range(4)]
    put(cache, batch(rows), [1, 2, 3, 4])

    if single:
        put(cache, one_row(rows[2]), [9])
    else:
        put(cache, batch([rows[2], rows[0]]), [9, 8])

    expected = [1, 2, 9, 4] if single else [8, 2, 9, 4]
    assert [values_at(cache, at) for at in rows] == [{value} for value in expected]


def moved_on(states: Sequence[mx.array]) -> list[mx.array]:
    """Return lazily what a step could make of states."""
    return [0.5 * state + mx.sum(mx.sin(state), axis=-1, keepdims=True) for state in states]


BIG = RowState("state", (256, 256), mx.float32)


def test_rows_side_by_side_find_their_states_in_one_piece() -> None:
    """Step for step the same rows: what one pass made is what the next is given, uncopied."""
    cache = RecurrentCache((BIG,))
    plan = batch([place(FIRST, 3), place(SECOND, 1), place(FIRST, 0)])
    cache.put(plan, moved_on(cache.states(plan)))
    mx.eval(list(cache.arrays().values()))
    (kept,) = cache.arrays().values()

    (states,) = cache.states(plan)

    assert states is kept


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_takes_memory_for_its_own_rows_only(rows: int) -> None:
    """A pass over a few of many rows needs room for what it computes, not for the others."""
    cache = RecurrentCache((BIG,))
    others = [place(SECOND, slot) for slot in range(64)]
    cache.put(batch(others), [mx.ones((64, *BIG.shape))])
    places = [place(FIRST, 17 * (index + 1)) for index in range(rows)]
    plan = one_row(places[0]) if rows == 1 else batch(places)
    cache.put(plan, moved_on(cache.states(plan)))
    mx.eval(list(cache.arrays().values()))
    for _ in range(3):
        before = live_nbytes()
        cache.put(plan, moved_on(cache.states(plan)))
        mx.eval(list(cache.arrays().values()))

        assert mx.get_peak_memory() - before <= 4 * rows * cache.slot_nbytes(256)
        assert abs(mx.get_active_memory() - before) <= SLACK_NBYTES


def test_nobodys_states_are_copied_when_a_row_comes_moves_or_goes() -> None:
    """A place is a name: opening, moving, clearing, leaving and closing allocate nothing."""
    cache = RecurrentCache((BIG,))
    rows = [place(FIRST, slot) for slot in range(3)]
    cache.put(batch(rows), moved_on(cache.states(batch(rows))))
    mx.eval(list(cache.arrays().values()))
    before = live_nbytes()

    cache.open(SECOND, capacity=1024, slots=64)
    cache.move(rows[1], place(SECOND, 5), cache.lift(rows[1]))
    cache.clear(rows[1])
    cache.free(rows[0])

    assert mx.get_active_memory() == before
    assert mx.get_peak_memory() <= before
    for left in (rows[2], place(SECOND, 5)):
        cache.free(left)
    cache.close(FIRST)
    assert mx.get_active_memory() <= before - 3 * cache.slot_nbytes(256)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=examples(20), deadline=None, derandomize=SAME_EACH_TIME)
def test_any_rows_keep_their_states_and_never_more_than_theirs(seed: int) -> None:
    """Whoever joins, steps, moves, is written and leaves: all find their own, and no more states
    are there than rows were at once since the last pass."""
    draws = random.Random(seed)
    cache = cache_of()
    free = [place(arena, slot) for arena in (FIRST, SECOND) for slot in range(8)]
    held: dict[Place, float] = {}
    for step in range(1, 60):
        verb = draws.choice(["join", "join", "step", "step", "step", "move", "leave", "write"])
        chosen = draws.sample(sorted(held, key=str), draws.randint(0, len(held)))
        if verb == "join" and len(held) < 8:
            held[free.pop(draws.randrange(len(free)))] = 0
        elif verb == "leave" and chosen:
            cache.free(chosen[0])
            free.append(chosen[0])
            del held[chosen[0]]
        elif verb == "move" and chosen:
            at = free.pop(draws.randrange(len(free)))
            cache.move(chosen[0], at, cache.lift(chosen[0]))
            free.append(chosen[0])
            held[at] = held.pop(chosen[0])
        elif verb == "write" and chosen:
            cache.write(chosen[0], 0, step, tuple(filled_states([step])))
            held[chosen[0]] = step
        elif verb == "step" and chosen:
            tail, state = cache.states(batch(chosen))
            assert floats(tail[:, 1, 2]) == floats(state[:, 1, 2, 3]) == [held[at] for at in chosen]
            values = [1000 + step + index for index in range(len(chosen))]
            put(cache, batch(chosen), values)
            held |= dict(zip(chosen, values, strict=True))
        if verb in ("step", "write") and chosen:
            with_states = sum(value > 0 for value in held.values())
            assert cache.nbytes == with_states * cache.slot_nbytes(256)
        assert cache.nbytes <= 8 * cache.slot_nbytes(256)
    assert {at: values_at(cache, at) for at in held} == {at: {held[at]} for at in held}
    for at in held:
        cache.free(at)
    assert cache.arrays() == {}


def test_nothing_of_the_step_stays_alive_with_its_state() -> None:
    """A state that is a view of a large activation is copied: the activation's memory returns."""
    cache = cache_of()
    for width, at in ((4096, place(FIRST, 0)), (2048, place(SECOND, 1))):
        before = live_nbytes()
        activations = mx.random.normal((1, width, *TAIL.shape[1:])).astype(mx.float16)
        state = mx.random.normal((1, 1000, *STATE.shape))[:, -1]
        cache.put(one_row(at, width=width), (activations[:, -TAIL.shape[0] :], state))
        mx.eval(list(cache.arrays().values()))
        kept = cache.read(at, 0, width)
        mx.eval(kept)
        assert mx.array_equal(kept[0], activations[:, -TAIL.shape[0] :])
        del activations, state, kept

        assert abs(mx.get_active_memory() - before) <= SLACK_NBYTES


def test_what_is_read_is_a_copy_of_its_own() -> None:
    """States that were read keep their values, and their memory only, whatever the row does."""
    before = live_nbytes()
    cache = cache_of()
    rows = [place(FIRST, slot) for slot in range(512)]
    put(cache, batch(rows), [5] * 512)
    kept = cache.read(rows[100], 0, 1)
    mx.eval(kept)

    put(cache, one_row(rows[100]), [6])
    for at in rows:
        cache.free(at)

    assert mx.get_active_memory() - before <= cache.slot_nbytes(256) + SLACK_NBYTES
    assert {value for array in kept for value in floats(array.flatten())} == {5}


def test_a_written_state_is_the_one_that_was_read() -> None:
    """What was read of one row can be put into another, in another arena."""
    cache = cache_of()
    put(cache, batch([place(FIRST, 1), place(FIRST, 3)]), [2, 7])

    cache.write(place(SECOND, 2), 0, 40, cache.read(place(FIRST, 3), 0, 40))

    assert values_at(cache, place(SECOND, 2)) == {7}
    assert values_at(cache, place(FIRST, 3)) == {7}
    assert values_at(cache, place(FIRST, 1)) == {2}


def test_a_row_moves_whole_and_the_next_one_finds_zeros() -> None:
    """A move takes all states along; where a row held NaN, the next row finds nothing of it."""
    cache = cache_of()
    put(cache, batch([place(FIRST, 0), place(FIRST, 2)]), [3, math.nan])

    cache.move(place(FIRST, 0), place(SECOND, 3), ())
    cache.free(place(FIRST, 2))

    assert values_at(cache, place(SECOND, 3)) == {3}
    assert values_at(cache, place(FIRST, 2)) == {0}
    put(cache, batch([place(FIRST, 0), place(SECOND, 3)]), [math.nan, 4])
    cache.clear(place(FIRST, 0))
    assert floats(cache.states(batch([place(FIRST, 0), place(SECOND, 3)]))[0][:, 0, 0]) == [0, 4]


def test_a_row_stands_only_where_it_stands() -> None:
    """No token can be taken back from a state, not even the last one."""
    cache = cache_of()

    assert cache.rewinds(7, 7)
    assert not cache.rewinds(7, 6)
    assert not cache.rewinds(7, 0)


def test_the_bytes_are_exact_and_those_of_rows() -> None:
    """An arena takes nothing, a row its states' bytes, whatever its capacity, until it leaves."""
    cache = cache_of()
    slot_nbytes = 3 * 10 * 2 + 2 * 4 * 5 * 4
    rows = [place(FIRST, 0), place(FIRST, 1), place(SECOND, 2)]
    cache.open(FIRST, capacity=256, slots=16)

    assert cache.nbytes == 0
    assert cache.slot_nbytes(256) == cache.slot_nbytes(1 << 20) == slot_nbytes
    put(cache, batch(rows[:2]), [1, 2])
    put(cache, one_row(rows[2]), [3])
    assert cache.nbytes == 3 * slot_nbytes
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
    assert len(cache.arrays()) == 4
    cache.free(rows[0])
    put(cache, one_row(rows[2]), [4])
    assert cache.nbytes == 2 * slot_nbytes
    cache.free(rows[2])
    assert cache.nbytes == slot_nbytes
    cache.free(rows[1])
    assert (cache.nbytes, cache.arrays()) == (0, {})
    assert cache.kind is Kind.RECURRENT


def test_a_row_grows_the_caches_by_its_states() -> None:
    """`join_nbytes` counts one row's states, though a class's first arena has many slots."""
    caches = RowCaches([cache_of(), cache_of()], context_max=1024, rows_max=16)
    for number in range(3):
        row, before = RowId(number), caches.nbytes
        expected = caches.join_nbytes(300)
        assert caches.join(row, tokens=300)
        plan = caches.plan((row,), offsets=mx.array([0]), lengths=(5,), width=5, dtype=mx.float32)
        for layer in caches.layers:
            assert isinstance(layer, RecurrentCache)
            put(layer, plan, [number])

        assert caches.nbytes - before == expected == 2 * cache_of().slot_nbytes(512)


@pytest.mark.parametrize("single", [True, False])
def test_states_of_another_form_are_refused(single: bool) -> None:
    """A wrong number, shape, row count or type of states is an error, and nothing is written."""
    cache = cache_of()
    rows = [place(FIRST, 1)] if single else [place(FIRST, 1), place(SECOND, 1)]
    plan = one_row(rows[0]) if single else batch(rows)
    tail, state = filled_states([4] * len(rows))
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
