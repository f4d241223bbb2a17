"""What expressions say about texts: whether one is found, whether two can be, and where one is not.

Invariants:
- Expressions are searched for, as JSON Schema means them.
- Answers are exact. What goes beyond the bounds, of one text with all of its expressions, is a
  `PatternError`, but for `never_both`, which then says no.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from mlxd_worker.constraints.automaton import Alphabet, Automaton, TooLarge
from mlxd_worker.constraints.grammar_tree import (
    ANY_CHAR,
    Chars,
    Choice,
    Item,
    Lexeme,
    Repeat,
    Sequence,
    walk,
)
from mlxd_worker.constraints.pattern_reader import PatternError
from mlxd_worker.constraints.patterns import quotable, searched, written

STATES_MAX: Final = 400
"""States of an expression that is turned into its opposite."""
WORK_MAX: Final = 3_000_000
"""Moves looked at for one text with expressions, which takes about a second."""

ITEMS_MAX: Final = 200_000
"""Parts of all expressions on the way to an opposite."""

_EMPTY: Final = Sequence(())
_EXIT: Final = -1
_States = frozenset[int]


class PatternSets:
    """The expressions of one text, and what is known of them. One owner."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], _Machine] = {}
        self._never: dict[tuple[str, str], bool] = {}
        self._work = 0

    def is_found(self, pattern: str, text: str) -> bool:
        """Tell whether an expression is found in a text.

        Raises:
            PatternError: it is wrong, cannot be served, or takes too much work.
        """
        machine = self._machine((pattern,))
        states = machine.automaton.begin()
        for char in text:
            part = machine.automaton.alphabet.part_of(char)
            moves = self._moves(machine, states)
            states = next((to for chars, to in moves if chars & part), _States())
        return machine.automaton.ended(states)[0]

    def never_both(self, first: str, second: str) -> bool:
        """Tell whether no text has both expressions in it; no where that cannot be told."""
        known = self._never.get((first, second))
        if known is None:
            try:
                known = self._exclude(self._machine((first, second)))
            except PatternError:
                known = False
            self._never[first, second] = known
        return known

    def without(self, pattern: str) -> str:
        """Return an expression, in the library's notation, of the whole texts without `pattern`.

        Raises:
            PatternError: it is wrong, cannot be served, or its opposite takes too much.
        """
        return self._opposite(self._machine((pattern,)))

    def without_texts(self, texts: Iterable[str]) -> str:
        """Return an expression, in the library's notation, of all texts but these.

        Raises:
            PatternError: it takes too much.
        """
        options = tuple(
            Sequence(tuple(Chars(((ord(char), ord(char)),)) for char in text)) for text in texts
        )
        return self._opposite(_built([Choice(options)]))

    def _machine(self, patterns: tuple[str, ...]) -> _Machine:
        if patterns not in self._found:
            self._found[patterns] = _built([searched(pattern) for pattern in patterns])
        return self._found[patterns]

    def _moves(self, machine: _Machine, states: _States) -> list[tuple[int, _States]]:
        found = machine.moves.get(states)
        if found is None:
            found = machine.moves[states] = machine.automaton.moves_of(states)
            ways = sum(len(machine.automaton.moves[state]) for state in states)
            self._work += (ways + 1) * (len(found) + 1)
            if self._work > WORK_MAX:
                raise PatternError("takes too long to compare with others")
        return found

    def _exclude(self, machine: _Machine) -> bool:
        automaton = machine.automaton
        seen, todo = {automaton.begin()}, [automaton.begin()]
        while todo:
            states = todo.pop()
            if all(automaton.ended(states)):
                return False
            for _, after in self._moves(machine, states):
                both = len({automaton.owner[state] for state in after}) == 2
                if both and after not in seen:
                    seen.add(after)
                    todo.append(after)
        return True

    def _opposite(self, machine: _Machine) -> str:
        automaton, edges = machine.automaton, _Edges()
        names = {automaton.begin(): 0, _States(): 1}
        todo = [automaton.begin()]
        edges.add(1, 1, ANY_CHAR)
        edges.add(1, _EXIT, _EMPTY)
        while todo:
            states = todo.pop()
            rest = automaton.alphabet.mask(ANY_CHAR)
            if not automaton.ended(states)[0]:
                edges.add(names[states], _EXIT, _EMPTY)
            for part, after in self._moves(machine, states):
                if after not in names:
                    if len(names) == STATES_MAX:
                        raise PatternError("its opposite takes too large an automaton")
                    names[after] = len(names)
                    todo.append(after)
                edges.add(names[states], names[after], automaton.alphabet.chars(part))
                rest &= ~part
            if rest:
                edges.add(names[states], 1, automaton.alphabet.chars(rest))
        return edges.expression(range(1, len(names)))


@dataclass(frozen=True, slots=True)
class _Machine:
    """An automaton, and the moves that have been looked at."""

    automaton: Automaton
    moves: dict[_States, list[tuple[int, _States]]] = field(default_factory=dict)


def _built(items: list[Item]) -> _Machine:
    chars = (at for item in items for at in walk(item) if isinstance(at, Chars))
    automaton = Automaton({}, Alphabet([ANY_CHAR, *chars]))
    try:
        for item in items:
            automaton.add(Lexeme(item))
    except TooLarge:
        raise PatternError("takes too large an automaton") from None
    return _Machine(automaton)


class _Edges:
    """An automaton whose moves are expressions, from 0 to `_EXIT`; states are taken out of it."""

    def __init__(self) -> None:
        self._size = 0
        self._to: dict[int, dict[int, Item]] = {}
        self._from: dict[int, set[int]] = {}

    def add(self, start: int, end: int, item: Item) -> None:
        """Add a way from one state to another."""
        ways = self._to.setdefault(start, {})
        ways[end] = _either(ways[end], item) if end in ways else item
        self._from.setdefault(end, set()).add(start)

    def expression(self, states: Iterable[int]) -> str:
        """Return what leads from the start to the exit; all other states are `states`."""
        left = set(states)
        while left:
            state = min(left, key=self._cost)
            left.remove(state)
            self._take_out(state)
        again = self._to.get(0, {}).get(0)
        out = self._to.get(0, {}).get(_EXIT)
        if out is None:
            raise PatternError("every text matches")
        whole = out if again is None else Sequence((Repeat(again, 0, None), out))
        return written(quotable(whole))

    def _cost(self, state: int) -> tuple[int, int]:
        return len(self._from.get(state, ())) * len(self._to.get(state, {})), state

    def _take_out(self, state: int) -> None:
        ways = self._to.pop(state, {})
        again = ways.pop(state, None)
        loop = () if again is None else (Repeat(again, 0, None),)
        before = self._from.pop(state, set()) - {state}
        for end in ways:
            self._from[end].discard(state)
        for start in before:
            way = self._to[start].pop(state)
            for end, item in ways.items():
                self.add(start, end, self._bounded(_joined(way, *loop, item)))

    def _bounded(self, item: Item) -> Item:
        """Return an item, unless all of them together are too large."""
        self._size += sum(1 for _ in islice(walk(item), ITEMS_MAX))
        if self._size > ITEMS_MAX:
            raise PatternError("its opposite is too large")
        return item


def _joined(*items: Item) -> Item:
    parts = [at for i in items for at in (i.items if isinstance(i, Sequence) else (i,))]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _either(first: Item, second: Item) -> Item:
    options = [at for i in (first, second) for at in (i.items if isinstance(i, Choice) else (i,))]
    return Choice(tuple(dict.fromkeys(options)))
