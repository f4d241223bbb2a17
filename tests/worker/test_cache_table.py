"""The row table: places, growth and release, against the rules that it promises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_worker.cache.base import Change, Clear, Move, Place, Resize, RowError, RowId
from mlxd_worker.cache.table import CAPACITY_MIN, CLASSES_MAX, RowTable, capacity_classes
from tests.support.effort import examples

A, B, C = RowId(1), RowId(2), RowId(3)


def table_of(*, context_max: int = 4096, rows_max: int = 8) -> RowTable:
    """Return an empty table."""
    return RowTable(context_max=context_max, rows_max=rows_max)


@given(st.integers(1, 1 << 24))
def test_classes_are_few_and_cover_the_context(context_max: int) -> None:
    """At most six ascending multiples of 256, the last one just above the context."""
    classes = capacity_classes(context_max)

    assert 1 <= len(classes) <= CLASSES_MAX
    assert list(classes) == sorted(set(classes))
    assert all(capacity % CAPACITY_MIN == 0 for capacity in classes)
    assert classes[-1] - CAPACITY_MIN < context_max <= classes[-1]


def test_classes_double_where_six_suffice() -> None:
    """Up to 8,192 tokens a row wastes at most half of its class."""
    assert capacity_classes(8192) == (256, 512, 1024, 2048, 4096, 8192)
    assert capacity_classes(700) == (256, 512, 768)


def test_a_row_that_leaves_is_replaced_by_the_last() -> None:
    """Slots stay dense at the cost of one row; the others do not move."""
    table = table_of()
    for row in (A, B, C):
        table.join(row, tokens=10)

    assert table.leave(A) == [Move(Place(256, 2), Place(256, 0))]
    assert (table.rows, table.place(C), table.place(B)) == ((C, B), Place(256, 0), Place(256, 1))


def test_the_last_row_releases_its_arena() -> None:
    """An arena without rows is given back at once."""
    table = table_of()
    table.join(A, tokens=10)

    assert table.leave(A) == [Resize(256, 0)]
    assert table.arenas == ()


def test_a_freed_slot_is_reused_cleared() -> None:
    """The next row takes a freed slot without growth, and does not see what was in it."""
    table = table_of()
    for row in (A, B):
        table.join(row, tokens=10)
    table.leave(B)

    assert table.join(C, tokens=10) == [Clear(Place(256, 1))]


def test_crossing_a_class_copies_the_row_once() -> None:
    """The row moves to the larger class, the hole is filled, and the old arena shrinks or goes."""
    table = table_of()
    for row in (A, B):
        table.join(row, tokens=256)

    assert table.reserve(A, tokens=256) == []
    assert table.reserve(A, tokens=257) == [
        Resize(512, 1),
        Move(Place(256, 0), Place(512, 0)),
        Move(Place(256, 1), Place(256, 0)),
    ]
    assert table.rows == (B, A)
    assert table.reserve(A, tokens=100) == []  # a row never moves back


def test_growth_asked_for_is_growth_made() -> None:
    """`slots_added` foretells what a join adds."""
    table = table_of(rows_max=6)

    added = []
    for number in range(6):
        expected = table.slots_added(256)
        before = table.slots_of(256)
        table.join(RowId(number), tokens=1)
        assert table.slots_of(256) - before == expected
        added.append(expected)

    assert added == [1, 1, 2, 0, 2, 0]


def test_an_arena_halves_at_a_quarter() -> None:
    """Slots that a burst left behind are given back, and not at the first row that leaves."""
    table = table_of()
    for number in range(8):
        table.join(RowId(number), tokens=1)

    seen = []
    for number in range(7):
        table.leave(RowId(number))
        seen.append(table.slots_of(256))

    assert seen == [8, 8, 8, 8, 8, 4, 2]


@pytest.mark.parametrize("tokens", [0, -1, 4097])
def test_lengths_out_of_range_are_refused(tokens: int) -> None:
    """No row is shorter than one token or longer than the context, and nothing has changed then."""
    table = table_of()
    table.join(A, tokens=1)

    with pytest.raises(RowError, match="4096 possible"):
        table.join(B, tokens=tokens)
    with pytest.raises(RowError, match="4096 possible"):
        table.reserve(A, tokens=tokens)
    assert table.rows == (A,)


def test_rows_are_known_once() -> None:
    """Joining twice, leaving twice, and one row too many are the caller's bugs."""
    table = table_of(rows_max=2)
    table.join(A, tokens=1)

    with pytest.raises(RowError, match="joined twice"):
        table.join(A, tokens=1)
    with pytest.raises(RowError, match="not in the table"):
        table.leave(B)
    table.join(B, tokens=1)
    with pytest.raises(RowError, match="2 rows already"):
        table.join(C, tokens=1)


class Shadow:
    """What the changes amount to, kept the naive way: who is where, and how much exists."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.content: dict[Place, RowId] = {}

    def carry_out(self, changes: list[Change], newcomer: RowId | None, table: RowTable) -> int:
        """Apply `changes`; return how many rows they copied."""
        copied = 0
        for change in changes:
            if isinstance(change, Resize):
                kept = [place for place in self.content if place.capacity == change.capacity]
                assert all(place.slot < change.slots for place in kept)
                copied += len(kept)
                self.slots[change.capacity] = change.slots
            elif isinstance(change, Move):
                assert change.target not in self.content
                assert change.target.slot < self.slots[change.target.capacity]
                self.content[change.target] = self.content.pop(change.source)
                copied += 1
            else:
                assert change.place not in self.content
        if newcomer is not None:
            self.content[table.place(newcomer)] = newcomer
        return copied


OPERATIONS = st.tuples(
    st.sampled_from(["join", "join", "reserve", "leave"]),
    st.integers(0, 11),
    st.sampled_from([1, 1, 1, 256, 257, 700, 2000, 4096]),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(OPERATIONS, min_size=1, max_size=120))
def test_any_program_keeps_every_row_in_its_place(
    program: list[tuple[str, int, int]],
) -> None:
    """Carrying out the changes leaves each row where the table says; copies stay amortised."""
    table = table_of(rows_max=8)
    shadow = Shadow()
    copied = calls = 0
    for verb, number, tokens in program:
        row = RowId(number)
        if verb == "join":
            if row in table or len(table) == 8:
                continue
            copied += shadow.carry_out(table.join(row, tokens=tokens), row, table)
        elif row not in table:
            continue
        elif verb == "reserve":
            copied += shadow.carry_out(table.reserve(row, tokens=tokens), None, table)
        else:
            del shadow.content[table.place(row)]
            copied += shadow.carry_out(table.leave(row), None, table)
        calls += 1

        assert shadow.content == {table.place(row): row for row in table.rows}
        assert {c: n for c, n in shadow.slots.items() if n} == {
            capacity: table.slots_of(capacity) for capacity in table.arenas
        }
        for capacity in table.arenas:
            rows = len(table.rows_of(capacity))
            assert rows <= table.slots_of(capacity) < max(4 * rows, 2)
    assert copied <= 4 * calls
