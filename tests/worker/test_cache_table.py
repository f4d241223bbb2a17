"""The row table: places, growth and release, against the rules that it promises."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.arena_sizes import (
    ARENA_SHAPES_MAX,
    ARENAS_MAX,
    CAPACITY_MIN,
    CLASSES_MAX,
    CLASSES_MAX_FEW_ROWS,
    ROWS_FEW,
    block_slots,
    capacity_classes,
    kv_tokens_bound,
    slot_sizes,
    slots_bound,
)
from mlxd_worker.cache.base import (
    ArenaId,
    Change,
    Clear,
    Close,
    Free,
    Move,
    Open,
    Place,
    RowError,
    RowId,
)
from mlxd_worker.cache.table import RowTable
from tests.support.effort import SAME_EACH_TIME, examples

A, B, C = RowId(1), RowId(2), RowId(3)
ROWS = st.integers(1, 256)
CONTEXTS = st.one_of(st.integers(256, 131072), st.sampled_from([256, 1024, 8192, 131072]))


def table_of(*, context_max: int = 4096, rows_max: int = 8) -> RowTable:
    """Return an empty table."""
    return RowTable(context_max=context_max, rows_max=rows_max)


def joined(table: RowTable, row: RowId, tokens: int) -> list[Change]:
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

    assert joined(table, A, 10) == [Open(ArenaId(0), capacity=256, slots=16)]
    assert joined(table, B, 200) == []
    assert joined(table, C, 4096) == [Open(ArenaId(1), capacity=4096, slots=1)]
    assert table.rows == (A, B, C)


def test_a_join_opens_what_was_foretold() -> None:
    """`opened_by_join` is what a join then does."""
    table = table_of(rows_max=16)
    for number, tokens in enumerate([1, 4000, 4000, 300, 5, 4000, 2000]):
        expected = table.opened_by_join(tokens)
        assert joined(table, RowId(number), tokens) == ([] if expected is None else [expected])
        table.tend()


def test_a_freed_slot_is_reused_cleared() -> None:
    """The next row takes a freed slot without growth, and does not see what was in it."""
    table = table_of()
    for row in (A, B):
        joined(table, row, 10)

    assert table.leave(A) == [Free(Place(ArenaId(0), 256, 0))]
    assert table.place(B) == Place(ArenaId(0), 256, 1)
    assert joined(table, C, 10) == [Clear(Place(ArenaId(0), 256, 0))]


def test_the_last_row_releases_its_arena() -> None:
    """An arena without rows is given back at once."""
    table = table_of()
    joined(table, A, 10)

    assert table.leave(A) == [Free(Place(ArenaId(0), 256, 0)), Close(ArenaId(0))]
    assert table.arenas == ()


def test_a_full_class_moves_one_row_a_step() -> None:
    """A join that finds its class full opens a larger arena; the others follow, one a `tend`."""
    table = table_of(rows_max=8)
    joined(table, A, 4000)
    assert joined(table, B, 4000) == [Open(ArenaId(1), capacity=4096, slots=2)]
    assert (table.moving, shapes(table)) == (True, [(4096, 1, 1), (4096, 2, 1)])

    assert table.join(C, tokens=4000) is None  # the free slot is A's
    assert table.tend() == [
        Move(Place(ArenaId(0), 4096, 0), Place(ArenaId(1), 4096, 1)),
        Close(ArenaId(0)),
    ]
    assert (table.moving, shapes(table)) == (False, [(4096, 2, 2)])
    assert table.tend() == []
    assert joined(table, C, 4000) == [Open(ArenaId(2), capacity=4096, slots=4)]


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
        joined(table, row, 256)

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
        joined(table, RowId(number), 2048)
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
    joined(table, A, 1)

    with pytest.raises(RowError, match="4096 possible"):
        table.join(B, tokens=tokens)
    with pytest.raises(RowError, match="4096 possible"):
        table.reserve({A: tokens})
    assert table.rows == (A,)


def test_rows_are_known_once() -> None:
    """Joining twice, leaving twice, and one row too many are the caller's bugs."""
    table = table_of(rows_max=2)
    joined(table, A, 1)

    with pytest.raises(RowError, match="joined twice"):
        table.join(A, tokens=1)
    with pytest.raises(RowError, match="not in the table"):
        table.leave(B)
    with pytest.raises(RowError, match="not in the table"):
        table.reserve({A: 1, B: 4000})
    joined(table, B, 1)
    with pytest.raises(RowError, match="2 rows already"):
        table.join(C, tokens=1)


class Shadow:
    """What the changes amount to, kept the naive way: who is where, and what exists."""

    def __init__(self) -> None:
        self.arenas: dict[ArenaId, Open] = {}
        self.content: dict[Place, RowId] = {}
        self.dirty: set[Place] = set()

    def carry_out(self, changes: Sequence[Change]) -> list[Move]:
        """Apply `changes`; return the moves."""
        for change in changes:
            match change:
                case Open(arena):
                    assert arena not in self.arenas
                    self.arenas[arena] = change
                case Close(arena):
                    assert all(place.arena != arena for place in self.content)
                    del self.arenas[arena]
                case Clear(place):
                    assert place not in self.content
                    self.dirty.discard(place)
                case Free(place):
                    del self.content[place]
                    self.dirty.add(place)
                case Move(source, target):
                    assert target.capacity >= source.capacity
                    row = self.content.pop(source)
                    self.dirty.add(source)
                    self.enter(row, target)
        return [change for change in changes if isinstance(change, Move)]

    def enter(self, row: RowId, place: Place) -> None:
        """A row takes a place that is free, exists, and holds nothing of another's."""
        opened = self.arenas[place.arena]
        assert place.capacity == opened.capacity
        assert place.slot < opened.slots
        assert place not in self.content
        assert place not in self.dirty
        self.content[place] = row


class Program:
    """A random program on a table and its shadow, which checks every promise at every step."""

    def __init__(self, rows_max: int, context_max: int, draws: random.Random) -> None:
        self.table = RowTable(context_max=context_max, rows_max=rows_max)
        self.shadow = Shadow()
        self.draws = draws
        self.tokens: dict[RowId, int] = {}
        self.number = 0
        self.crossed = 0
        self.resorts = 0

    def length(self) -> int:
        """Return a length, as often short as long."""
        return int(2 ** self.draws.uniform(0, math.log2(self.table.context_max)))

    def join(self) -> bool:
        """Join a row if the table is not full; return whether it was admitted."""
        if len(self.tokens) == self.table.rows_max:
            return True
        row, tokens = RowId(self.number), self.length()
        changes = self.table.join(row, tokens=tokens)
        if changes is None:
            return False
        self.number += 1
        assert all(isinstance(change, Open | Clear) for change in changes)
        assert self.shadow.carry_out(changes) == []
        self.shadow.enter(row, self.table.place(row))
        self.tokens[row] = tokens
        return True

    def reserve(self) -> None:
        """Some rows grow, a little or a lot; each that crosses moves once, alone."""
        chosen = [row for row in self.tokens if self.draws.random() < 0.3]
        most = self.table.context_max
        wanted = {
            row: min(self.tokens[row] + 1 + int(self.length() * self.draws.random()), most)
            for row in chosen
        }
        crossing = {r for r, n in wanted.items() if n > self.table.capacity(r)}
        self.crossed += len(crossing)
        before = self.table.finished_moves
        moves = self.shadow.carry_out(self.table.reserve(wanted))
        self.tokens |= wanted
        if self.table.finished_moves == before:
            assert len(moves) == len(crossing)
        assert all(self.table.capacity(row) >= tokens for row, tokens in self.tokens.items())

    def leave(self) -> None:
        """A row leaves, which is told by its place; nobody moves."""
        if self.tokens:
            row = self.draws.choice(list(self.tokens))
            del self.tokens[row]
            assert self.shadow.carry_out(self.table.leave(row)) == []

    def tend(self) -> None:
        """At most one row moves."""
        assert len(self.shadow.carry_out(self.table.tend())) <= 1

    def check(self) -> None:
        """Everything is where the table says, within all bounds, and nothing is kept for nobody."""
        table = self.table
        assert self.shadow.content == {table.place(row): row for row in self.tokens}
        assert self.shadow.content == {
            Place(arena.arena, arena.capacity, slot): row
            for arena in table.arenas
            for slot, row in enumerate(table.rows_of(arena.arena))
            if row is not None
        }
        assert list(self.shadow.arenas.values()) == sorted(table.arenas, key=lambda a: a.arena)
        assert {place.arena for place in self.shadow.content} == set(self.shadow.arenas)
        assert len(table.arenas) <= ARENAS_MAX
        assert table.tokens <= kv_tokens_bound(table.context_max, table.rows_max)
        assert sum(arena.slots for arena in table.arenas) <= slots_bound(table.rows_max)
        sizes = slot_sizes(table.rows_max)
        assert all(a.slots in sizes and a.capacity in table.classes for a in table.arenas)
        assert len(set(table.rows)) == len(self.tokens)


@settings(max_examples=examples(60), deadline=None, derandomize=SAME_EACH_TIME)
@given(
    rows_max=ROWS,
    context_max=CONTEXTS,
    seed=st.integers(0, 1 << 32),
    steps=st.integers(200, 400),
    weights=st.tuples(*[st.integers(1, 8)] * 4),
)
def test_any_program_keeps_every_promise(
    rows_max: int, context_max: int, seed: int, steps: int, weights: tuple[int, ...]
) -> None:
    """Carrying out the changes leaves each row where the table says, and every bound holds."""
    program = Program(rows_max, context_max, random.Random(seed))
    verbs = [program.join, program.reserve, program.leave, program.tend]
    for _ in range(steps):
        (verb,) = program.draws.choices(verbs, weights)
        verb()
        program.check()
    for _ in range(len(program.tokens)):
        program.leave()
    program.check()
    assert program.table.arenas == ()


@settings(max_examples=examples(60), deadline=None, derandomize=SAME_EACH_TIME)
@given(rows_max=ROWS, context_max=CONTEXTS, seed=st.integers(0, 1 << 32), crowd=st.integers(0, 300))
def test_a_waiting_join_is_admitted_in_time(
    rows_max: int, context_max: int, seed: int, crowd: int
) -> None:
    """After any crowd, `rows_max` calls of `tend` later there is room, unless no memory or no arena
    is left for the class to move; once a row of the largest arenas leaves, there is.
    """
    program = Program(rows_max, context_max, random.Random(seed))
    for _ in range(crowd):
        program.draws.choice([program.join, program.join, program.reserve, program.tend])()
        if len(program.tokens) == rows_max:
            program.leave()
    table, tokens, row = program.table, program.length(), RowId(program.number)
    for _ in range(rows_max):
        changes = table.join(row, tokens=tokens)
        if changes is not None:
            return
        program.tend()
    changes = table.join(row, tokens=tokens)

    capacity = table.class_of(tokens)
    own = sum(used for shape, _, used in shapes(table) if shape == capacity)
    size = next(size for size in slot_sizes(rows_max) if size > own)
    fits = table.tokens + size * capacity <= kv_tokens_bound(context_max, rows_max) and (
        sum(arena.slots for arena in table.arenas) + size <= slots_bound(rows_max)
    )
    fits = fits and (table.moving or len(table.arenas) < ARENAS_MAX)
    assert changes is not None or not fits, (shapes(table), table.moving, tokens)
    if changes is None:
        longest = max(program.tokens, key=table.capacity)
        table.leave(longest)
        assert table.join(row, tokens=tokens) is not None


@pytest.mark.parametrize("rows_max", [1, 4, 6, 7, 16])
@pytest.mark.parametrize("context_max", [8192, 131072])
def test_rows_that_all_grow_long_never_deadlock(rows_max: int, context_max: int) -> None:
    """All rows at full length have their places: the bound is what they need, and no more."""
    program = Program(rows_max, context_max, random.Random(rows_max))
    for _ in range(rows_max):
        while not program.join():
            program.tend()
    while any(tokens < context_max for tokens in program.tokens.values()):
        program.reserve()
        program.tend()
        program.check()


def traffic(program: Program, *, steps: int) -> None:
    """Serve prompts of all lengths, each followed by up to 400 tokens, one a step for all rows."""
    left: dict[RowId, int] = {}
    table, draws = program.table, program.draws
    for _ in range(steps):
        while len(program.tokens) < table.rows_max and program.join():
            continue
        for row in program.tokens.keys() - left.keys():
            left[row] = min(draws.randint(1, 400), table.context_max - program.tokens[row])
        wanted = {row: min(n + 1, table.context_max) for row, n in program.tokens.items()}
        program.crossed += sum(n > table.capacity(row) for row, n in wanted.items())
        before = table.finished_moves
        program.shadow.carry_out(table.reserve(wanted))
        program.resorts += table.finished_moves > before
        program.tokens |= wanted
        for row in [row for row in program.tokens if left[row] <= 1]:
            del program.tokens[row], left[row]
            program.shadow.carry_out(table.leave(row))
        left = {row: count - 1 for row, count in left.items()}
        program.tend()


@pytest.mark.parametrize("rows_max", [4, 16, 64])
@pytest.mark.parametrize("context_max", [8192, 131072])
def test_the_last_resort_is_rare(rows_max: int, context_max: int) -> None:
    """In traffic of all lengths at most one crossing in fifty makes others move at once, and in all
    at most one row is moved so for eight that cross.
    """
    finished = crossed = resorts = 0
    for seed in range(3):
        program = Program(rows_max, context_max, random.Random(seed))
        traffic(program, steps=2000)
        program.check()
        finished += program.table.finished_moves
        crossed += program.crossed
        resorts += program.resorts

    assert crossed > 30
    assert resorts <= crossed / 50
    assert finished <= crossed / 8
