"""The standard cache against the whole history, with contents that tell their row and position."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxd_worker.cache.base import RowError, RowId
from tests.support.effort import SAME_EACH_TIME, examples
from tests.worker.naive_kv import CONTEXT_MAX, ROWS_MAX, Naive, naive


@dataclass(frozen=True)
class Step:
    """One step of a program; what it cannot do now it leaves out."""

    verb: str
    number: int
    order: int
    amount: int


STEPS = st.builds(
    Step,
    verb=st.sampled_from(["join", "chunk", "chunk", "decode", "decode", "tend", "rewind", "leave"]),
    number=st.integers(0, ROWS_MAX + 1),
    order=st.integers(0, 119),
    amount=st.integers(1, 300),
)


def run(pair: Naive, step: Step, *, drafts: bool = True) -> None:
    """Carry out one step on both; with drafts some batches have several tokens a row."""
    row = RowId(step.number)
    if step.verb == "join":
        if row not in pair.keys and len(pair.keys) < ROWS_MAX:
            pair.join(row, step.amount)
    elif step.verb == "tend":
        pair.caches.tend()
    elif step.verb == "decode":
        width = 1 + step.order % 4 if step.amount % 3 == 0 and drafts else 1
        able = [r for r in pair.keys if pair.length(r) + width <= CONTEXT_MAX]
        # Some of the rows, in some order: a batch need not hold every row of an arena.
        able.sort(key=lambda r: (r * 7 + step.order) % 11)
        chosen = able[: 1 + step.amount % ROWS_MAX]
        if chosen:
            pair.append(tuple(chosen), width)
    elif row not in pair.keys:
        return
    elif step.verb == "chunk":
        width = min(step.amount, CONTEXT_MAX - pair.length(row))
        if width:
            pair.append((row,), width)
    elif step.verb == "rewind":
        pair.rewind(row, pair.length(row) * step.order // 119)
    else:
        pair.leave(row)


@settings(
    max_examples=examples(12),
    deadline=None,
    derandomize=SAME_EACH_TIME,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(STEPS, min_size=20, max_size=60), st.booleans())
def test_any_program_reads_what_was_written(program: list[Step], bounded_shapes: bool) -> None:
    """Joins, appends, rewinds, moves and leaves in any order read exactly each row's own history;
    where shapes are bounded, in no other shapes than those that are warmed.
    """
    pair = naive(bounded_shapes=bounded_shapes)
    for step in program:
        run(pair, step, drafts=not bounded_shapes)
        pair.check()
    assert pair.shapes <= set(pair.caches.shapes())


@settings(
    max_examples=examples(3),
    deadline=None,
    derandomize=SAME_EACH_TIME,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example,
                           HealthCheck.data_too_large],
)  # fmt: skip
@given(st.lists(STEPS, min_size=250, max_size=260))
def test_long_programs_too(program: list[Step]) -> None:
    """The same over hundreds of steps on one cache."""
    pair = naive()
    for step in program:
        run(pair, step)
    pair.check()


def test_everything_is_given_back() -> None:
    """When the last row leaves, the cache holds no array."""
    pair = naive()
    for number in range(ROWS_MAX):
        pair.join(RowId(number), 200 * (number + 1))

    for number in range(ROWS_MAX):
        pair.leave(RowId(number))

    assert (pair.caches.nbytes, pair.caches.state()) == (0, [])


def test_the_growth_of_a_join_is_known_beforehand() -> None:
    """`join_nbytes` is to the byte what joining adds, growth of the arena included."""
    pair = naive()
    for number, tokens in enumerate([10, 20, 300, 30, 1000]):
        expected = pair.caches.nbytes + pair.caches.join_nbytes(tokens)
        pair.join(RowId(number), tokens)
        assert pair.caches.nbytes == expected


def test_rows_and_lengths_are_checked_before_a_write() -> None:
    """Unknown and doubled rows and lengths that do not fit are refused on the host."""
    pair = naive()
    pair.join(RowId(1), 10)

    def plan(rows: tuple[RowId, ...], lengths: tuple[int, ...], width: int = 1) -> None:
        offsets = mx.array([n - width for n in lengths], dtype=mx.int32)
        pair.caches.plan(rows, offsets=offsets, lengths=lengths, width=width, dtype=mx.float32)

    for rows, lengths, width in [
        ((), (), 1),
        ((RowId(2),), (1,), 1),
        ((RowId(1), RowId(1)), (1, 1), 1),
        ((RowId(1),), (257,), 1),
        ((RowId(1),), (3,), 4),
        ((RowId(1),), (1, 2), 1),
    ]:
        with pytest.raises(RowError):
            plan(rows, lengths, width)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (3, 4), (0, 700), (299, 301)])
def test_what_is_read_is_put_back(start: int, stop: int) -> None:
    """Any range, empty ones too, comes back to the bit, in another row of another arena."""
    pair = naive()
    for row in (RowId(1), RowId(2)):
        pair.join(row, 700 if row == 1 else 1024)
        pair.append((row,), 700)
    cache, table = pair.kv_cache(), pair.caches.table

    state = cache.read(table.place(RowId(1)), start, stop)
    mx.eval(state)
    cache.write(table.place(RowId(2)), start, stop, state)

    again = cache.read(table.place(RowId(2)), 0, 700)
    for kept, new in zip((pair.keys, pair.values), again, strict=True):
        kept[RowId(2)][:, start:stop] = kept[RowId(1)][:, start:stop]
        assert mx.array_equal(new[0], kept[RowId(2)]).item()


def test_a_wrong_state_is_refused() -> None:
    """Positions that are not those named, or more than the row has room for, are not written."""
    pair = naive()
    pair.join(RowId(1), 10)
    pair.append((RowId(1),), 10)
    cache, place = pair.kv_cache(), pair.caches.table.place(RowId(1))
    state = cache.read(place, 0, 10)

    with pytest.raises(RowError, match="10 positions"):
        cache.write(place, 0, 9, state)
    with pytest.raises(RowError, match="capacity"):
        cache.write(place, place.capacity - 5, place.capacity + 5, state)
    pair.check()


def test_a_row_that_moved_is_found_by_the_same_batch() -> None:
    """A batch of the same rows as before follows a row that filled another's hole."""
    pair = naive()
    for number in (1, 2, 3):
        pair.join(RowId(number), 10)
        pair.append((RowId(number),), 4)
    pair.append((RowId(2), RowId(3)), 1)

    pair.leave(RowId(1))

    pair.append((RowId(2), RowId(3)), 1)
    pair.check()
