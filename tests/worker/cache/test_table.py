"""The row table: places, growth and release, against the rules that it promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_models.sizes.arena_sizes import (
    ARENA_SHAPES_MAX,
    CAPACITY_MIN,
    CLASSES_MAX,
    CLASSES_MAX_FEW_ROWS,
    ROWS_FEW,
    block_slots,
    capacity_classes,
    kv_tokens_bound,
    slot_sizes,
)
from mlxd_worker.cache.arenas.table import RowTable
from mlxd_worker.cache.base import (
    ArenaId,
    Change,
    Clear,
    Close,
    Free,
    Move,
    Open,
    Place,
    Reuse,
    RowError,
    RowId,
)

A, B, C = RowId(1), RowId(2), RowId(3)
ROWS = st.integers(1, 256)
CONTEXTS = st.one_of(st.integers(256, 131072), st.sampled_from([256, 1024, 8192, 131072]))


def table_of(
    *,
    context_max: int = 4096,
    rows_max: int = 8,
    keeps_spares: bool = False,
    sinks: bool = False,
) -> RowTable:
    """Return an empty table."""
    return RowTable(
        context_max=context_max, rows_max=rows_max, keeps_spares=keeps_spares, sinks=sinks
    )


def join_row(table: RowTable, row: RowId, tokens: int) -> list[Change]:
    """Join a row for which there must be room."""
    changes = table.join(row, tokens=tokens)
    assert changes is not None
    return changes


def shapes(table: RowTable) -> list[tuple[int, int, int]]:
    """Return capacity, slots and rows of every arena."""
    return [
        (arena.capacity, arena.slots, sum(row is not None for row in table.rows_of(arena.arena)))
        for arena in table.arenas
    ]


@given(CONTEXTS | st.integers(1, 1 << 24), ROWS)
def test_classes_are_few_and_cover_the_context(context_max: int, rows_max: int) -> None:
    """Ascending powers of two, five of them (ten for few rows), the last just above the context."""
    classes = capacity_classes(context_max, rows_max)

    most = CLASSES_MAX_FEW_ROWS if rows_max <= ROWS_FEW else CLASSES_MAX
    assert 1 <= len(classes) <= most
    assert list(classes) == sorted(set(classes))
    assert all(capacity.bit_count() == 1 for capacity in classes[:-1])
    assert classes[-1] % CAPACITY_MIN == 0
    assert classes[-1] - CAPACITY_MIN < context_max <= classes[-1]


def test_classes_double_where_they_suffice() -> None:
    """Up to 4,096 tokens a row wastes at most half of its class; beyond, small classes give way."""
    assert capacity_classes(4096, 16) == (256, 512, 1024, 2048, 4096)
    assert capacity_classes(8192, 16) == (256, 1024, 2048, 4096, 8192)
    assert capacity_classes(131072, 16) == (256, 2048, 8192, 32768, 131072)
    assert capacity_classes(700, 16) == (256, 512, 768)
    assert len(capacity_classes(131072, 6)) == CLASSES_MAX_FEW_ROWS


@given(CONTEXTS, ROWS)
def test_sizes_are_few(context_max: int, rows_max: int) -> None:
    """Capacities times numbers of slots are few; a block is one of the sizes."""
    classes, sizes = capacity_classes(context_max, rows_max), slot_sizes(rows_max)

    assert len(classes) * len(sizes) <= ARENA_SHAPES_MAX
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == rows_max
    assert {block_slots(capacity, rows_max) for capacity in classes} <= set(sizes)
    assert kv_tokens_bound(context_max, rows_max) == rows_max * classes[-1]


def test_short_rows_share_a_block() -> None:
    """The first row of a class opens room for more, and these cost nothing; a long one none."""
    table = table_of(rows_max=16)

    assert join_row(table, A, 10) == [Open(ArenaId(0), capacity=256, slots=16)]
    assert join_row(table, B, 200) == []
    assert join_row(table, C, 4096) == [Open(ArenaId(1), capacity=4096, slots=1)]
    assert table.rows == (A, B, C)


def test_a_join_opens_what_was_foretold() -> None:
    """`opened_by_join` is what a join then does."""
    table = table_of(rows_max=16)
    for number, tokens in enumerate([1, 4000, 4000, 300, 5, 4000, 2000]):
        expected, closed = table.opened_by_join(tokens)
        assert closed == ()
        assert join_row(table, RowId(number), tokens) == ([] if expected is None else [expected])
        table.tend()


def test_a_freed_slot_is_reused_cleared() -> None:
    """The next row takes a freed slot without growth, and does not see what was in it."""
    table = table_of()
    for row in (A, B):
        join_row(table, row, 10)

    assert table.leave(A) == [Free(Place(ArenaId(0), 256, 0))]
    assert table.place(B) == Place(ArenaId(0), 256, 1)
    assert join_row(table, C, 10) == [Clear(Place(ArenaId(0), 256, 0))]


def test_the_last_row_releases_its_arena() -> None:
    """An arena without rows is given back at once."""
    table = table_of()
    join_row(table, A, 10)

    assert table.leave(A) == [Free(Place(ArenaId(0), 256, 0)), Close(ArenaId(0))]
    assert (table.arenas, table.spares) == ((), ())


def test_the_last_row_leaves_a_spare() -> None:
    """Where spares are kept, the next arena of its shape is made of the one without rows."""
    table = table_of(keeps_spares=True)
    join_row(table, A, 10)

    assert table.leave(A) == [Free(Place(ArenaId(0), 256, 0))]
    assert table.arenas == ()
    (spare,) = table.spares
    assert table.opened_by_join(10) == (None, ())
    assert join_row(table, B, 10) == [
        Reuse(ArenaId(0), ArenaId(1), capacity=256, slots=spare.slots),
        Clear(Place(ArenaId(1), 256, 0)),
    ]
    assert table.spares == ()


def test_rest_closes_spares() -> None:
    """Spares go when asked, all of them, the oldest first."""
    table = table_of(rows_max=1, keeps_spares=True)
    for tokens in (10, 300):
        join_row(table, A, tokens)
        table.leave(A)

    assert table.rest() == [Close(ArenaId(0)), Close(ArenaId(1))]
    assert table.spares == ()


def test_spares_make_room_for_arenas() -> None:
    """Spares never keep an arena from opening, and with it never exceed the bound."""
    table = table_of(rows_max=1, keeps_spares=True)
    join_row(table, A, 10)
    table.leave(A)

    assert table.opened_by_join(4000) == (
        Open(ArenaId(1), capacity=4096, slots=1),
        (Open(ArenaId(0), capacity=256, slots=1),),
    )
    assert join_row(table, A, 4000) == [Close(ArenaId(0)), Open(ArenaId(1), capacity=4096, slots=1)]


def test_a_join_opens_for_those_that_are_coming() -> None:
    """A crowd that joins finds one arena for all, and nobody has to move later."""
    table = table_of(rows_max=32)

    assert table.join(A, tokens=10, coming=30) == [Open(ArenaId(0), capacity=256, slots=32)]


def test_a_crossing_row_opens_for_those_that_follow() -> None:
    """Rows near the end of their class, and not of their lives, have slots where the first goes."""
    table = table_of(rows_max=64)
    kinds = [(256, 900)] * 4 + [(200, 900)] * 14 + [(200, 256)] * 20 + [(9, 900)] * 20
    for number, (tokens, tokens_max) in enumerate(kinds):
        while table.join(RowId(number), tokens=tokens, tokens_max=tokens_max) is None:
            table.tend()

    (opened,) = (c for c in table.reserve({RowId(0): 257}) if isinstance(c, Open))
    assert (opened.capacity, opened.slots) == (512, 32)


def test_a_full_class_moves_one_row_a_step() -> None:
    """A join that finds its class full opens a larger arena; the others follow, one a `tend`."""
    table = table_of(rows_max=8)
    join_row(table, A, 4000)
    assert join_row(table, B, 4000) == [Open(ArenaId(1), capacity=4096, slots=2)]
    assert (table.moving, shapes(table)) == (True, [(4096, 1, 1), (4096, 2, 1)])

    assert table.join(C, tokens=4000) is None  # the free slot is A's
    assert table.tend() == [
        Move(Place(ArenaId(0), 4096, 0), Place(ArenaId(1), 4096, 1)),
        Close(ArenaId(0)),
    ]
    assert (table.moving, shapes(table)) == (False, [(4096, 2, 2)])
    assert table.tend() == []
    assert join_row(table, C, 4000) == [Open(ArenaId(2), capacity=4096, slots=4)]


def test_where_both_do_not_fit_an_arena_is_added() -> None:
    """Near the bound a class has two arenas rather than none for its next row."""
    table = table_of(rows_max=8)
    for number in range(8):
        while table.join(RowId(number), tokens=4000) is None:
            assert table.tend()

    assert table.tokens == kv_tokens_bound(4096, 8)
    assert shapes(table) == [(4096, 4, 4), (4096, 4, 4)]
    assert table.finished_moves == 0


def test_crossing_a_class_moves_the_row_alone() -> None:
    """The row goes to the larger class; its slot is free at once, its neighbours stay."""
    table = table_of()
    for row in (A, B):
        join_row(table, row, 256)

    assert table.reserve({A: 256, B: 100}) == []
    assert table.reserve({A: 257}) == [
        Open(ArenaId(1), capacity=512, slots=8),
        Move(Place(ArenaId(0), 256, 0), Place(ArenaId(1), 512, 0)),
    ]
    assert table.rows == (B, A)
    assert table.reserve({A: 100}) == []  # a row never moves back


def test_rows_that_cross_together_find_room_together() -> None:
    """Eight rows that cross in one step open one arena for all of them, and move once each."""
    table = table_of(rows_max=64)
    for number in range(9):
        join_row(table, RowId(number), 2048)
        table.tend()
    while table.tend():
        pass

    changes = table.reserve({RowId(number): 2049 for number in range(8)})

    opened = [change for change in changes if isinstance(change, Open)]
    assert [(arena.capacity, arena.slots) for arena in opened] == [(4096, 8)]
    assert sum(isinstance(change, Move) for change in changes) == 8
    assert table.finished_moves == 0


def test_a_sparse_class_moves_into_less() -> None:
    """Slots that a burst left behind are given back, one row a `tend`; a block stays."""
    table = table_of(rows_max=32)
    for number in range(32):
        while table.join(RowId(number), tokens=1000) is None:
            table.tend()
    while table.tend():
        pass
    for number in range(25):
        table.leave(RowId(number))

    steps = 0
    while table.tend():
        steps += 1

    assert shapes(table) == [(1024, 16, 7)]
    assert steps == 7


def test_rows_sink_where_only_the_last_one_counts() -> None:
    """What is read of an arena is less than two slots a row; no arena opens for it."""
    table = table_of(rows_max=32, context_max=131072, sinks=True)
    for number in range(32):
        while table.join(RowId(number), tokens=1000) is None:
            table.tend()
    while table.tend():
        pass
    before = table.arenas
    for number in range(25):
        table.leave(RowId(number))

    steps = 0
    while changes := table.tend():
        assert [type(change) for change in changes] == [Clear, Move]
        steps += 1

    assert table.arenas == before
    assert max(table.place(row).slot for row in table.rows) + 1 < 2 * 7
    assert 1 <= steps <= 7


def test_a_row_without_other_room_goes_where_there_is_some() -> None:
    """A slot of a larger class is better than none."""
    table = table_of(rows_max=2, context_max=512)
    for row in (A, B):
        while table.join(row, tokens=512) is None:
            table.tend()
    table.leave(A)

    assert table.join(C, tokens=1) == [Clear(Place(table.place(B).arena, 512, 0))] or (
        table.place(C).capacity == 512
    )


@pytest.mark.parametrize("tokens", [0, -1, 4097])
def test_lengths_out_of_range_are_refused(tokens: int) -> None:
    """No row is shorter than one token or longer than the context, and nothing has changed then."""
    table = table_of()
    join_row(table, A, 1)

    with pytest.raises(RowError, match="4096 possible"):
        table.join(B, tokens=tokens)
    with pytest.raises(RowError, match="4096 possible"):
        table.reserve({A: tokens})
    assert table.rows == (A,)


def test_rows_are_known_once() -> None:
    """Joining twice, leaving twice, and one row too many are the caller's bugs."""
    table = table_of(rows_max=2)
    join_row(table, A, 1)

    with pytest.raises(RowError, match="joined twice"):
        table.join(A, tokens=1)
    with pytest.raises(RowError, match="not in the table"):
        table.leave(B)
    with pytest.raises(RowError, match="not in the table"):
        table.reserve({A: 1, B: 4000})
    join_row(table, B, 1)
    with pytest.raises(RowError, match="2 rows already"):
        table.join(C, tokens=1)


def test_rows_of_one_class_have_no_more_slots_than_there_are_rows() -> None:
    """However they come: the whole context is theirs from the start, and no slot is wasted."""
    for rows_max in (1, 3, 5, 8):
        table = RowTable(context_max=2048, rows_max=rows_max, one_class=True)
        assert table.classes == (2048,)
        for number in range(rows_max):
            while table.join(RowId(number), tokens=1 + 300 * (number % 5)) is None:
                assert table.tend(), "there is always room for a row that may be there"
            assert sum(arena.slots for arena in table.arenas) <= rows_max
            assert table.reserve({RowId(number): 2048}) == []


@pytest.mark.parametrize(
    ("tokens", "tokens_max", "capacity"),
    [(128, 384, 512), (128, 256, 256), (128, 513, 256), (200, None, 256), (300, 4096, 512)],
    ids=["next class", "own class", "too far", "unknown", "very long"],
)
def test_a_row_that_soon_needs_the_next_class_joins_it(
    tokens: int, tokens_max: int | None, capacity: int
) -> None:
    """Where free positions cost nothing: then it need not move; for a far one it does not pay."""
    table, padded = table_of(sinks=True), table_of()

    opened, _ = table.opened_by_join(tokens, tokens_max=tokens_max)
    assert opened is not None
    assert opened.capacity == capacity
    assert table.join(A, tokens=tokens, tokens_max=tokens_max) is not None
    assert padded.join(A, tokens=tokens, tokens_max=tokens_max) is not None

    assert table.capacity(A) == capacity
    assert padded.capacity(A) == table.class_of(tokens)


def test_without_room_in_the_next_class_a_row_joins_its_own() -> None:
    """Nobody waits for a place that only saves a move."""
    table = table_of(context_max=512, rows_max=2, sinks=True)
    assert table.join(A, tokens=100, tokens_max=400) is not None
    assert table.capacity(A) == 512
    assert table.join(B, tokens=400) is not None

    assert table.leave(A)
    assert table.join(C, tokens=100, tokens_max=400) is not None

    assert table.tokens <= kv_tokens_bound(512, 2)
