"""Random programs and traffic on the row table: what it promises whatever is asked of it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_models.sizes.arena_sizes import ARENAS_MAX, kv_tokens_bound, slot_sizes, slots_bound
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
    RowId,
)
from tests.support.effort import SAME_EACH_TIME, examples
from tests.worker.cache.test_table import CONTEXTS, ROWS, shapes


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
                case Reuse(spare, arena, capacity, slots):
                    assert self.arenas.pop(spare) == Open(spare, capacity, slots)
                    self.arenas[arena] = Open(arena, capacity, slots)
                    self.dirty = {_rename(place, spare, arena) for place in self.dirty}
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


def _rename(place: Place, spare: ArenaId, arena: ArenaId) -> Place:
    return Place(arena, place.capacity, place.slot) if place.arena == spare else place


class Program:
    """A random program on a table and its shadow, which checks every promise at every step."""

    def __init__(self, rows_max: int, context_max: int, draws: random.Random) -> None:
        self.table = RowTable(
            context_max=context_max,
            rows_max=rows_max,
            keeps_spares=draws.random() < 0.5,
            sinks=draws.random() < 0.5,
        )
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
        coming, longest = self.draws.randint(1, self.table.rows_max), self.table.context_max
        tokens_max = self.draws.choice([None, self.draws.randint(tokens, longest)])
        changes = self.table.join(row, tokens=tokens, tokens_max=tokens_max, coming=coming)
        if changes is None:
            return False
        self.number += 1
        assert all(isinstance(change, Open | Reuse | Close | Clear) for change in changes)
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

    def rest(self) -> None:
        """Spares are closed, and nothing else is."""
        changes = self.table.rest()
        assert all(isinstance(change, Close) for change in changes)
        assert self.shadow.carry_out(changes) == []
        assert self.table.spares == ()

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
        held = (*table.arenas, *table.spares)
        assert self.shadow.arenas == {arena.arena: arena for arena in held}
        assert {place.arena for place in self.shadow.content} == {a.arena for a in table.arenas}
        assert len(table.arenas) <= ARENAS_MAX
        tokens = sum(arena.capacity * arena.slots for arena in held)
        assert tokens <= kv_tokens_bound(table.context_max, table.rows_max)
        assert sum(arena.slots for arena in held) <= slots_bound(table.rows_max)
        sizes = slot_sizes(table.rows_max)
        assert all(a.slots in sizes and a.capacity in table.classes for a in table.arenas)
        assert len(set(table.rows)) == len(self.tokens)


@settings(max_examples=examples(60), deadline=None, derandomize=SAME_EACH_TIME)
@given(
    rows_max=ROWS,
    context_max=CONTEXTS,
    seed=st.integers(0, 1 << 32),
    steps=st.integers(200, 400),
    weights=st.tuples(*[st.integers(1, 8)] * 5),
)
def test_any_program_keeps_every_promise(
    rows_max: int, context_max: int, seed: int, steps: int, weights: tuple[int, ...]
) -> None:
    """Carrying out the changes leaves each row where the table says, and every bound holds."""
    program = Program(rows_max, context_max, random.Random(seed))
    verbs = [program.join, program.reserve, program.leave, program.tend, program.rest]
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
