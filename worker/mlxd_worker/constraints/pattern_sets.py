"""What expressions say about texts: whether one is found, whether two can be, and where one is not.

Invariants:
- Expressions are searched for, as JSON Schema means them.
- Answers are exact. What would take an automaton beyond the bounds is a `PatternError`, but for
  `never_both`, which then says no.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from mlxd_worker.constraints.automaton import SUBSETS_MAX, Alphabet, Automaton, TooLarge
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
from mlxd_worker.constraints.patterns import SIZE_MAX, quotable, searched, written

STATES_MAX: Final = 400
"""States of an expression that is turned into its opposite."""
KEPT_MAX: Final = 256

_EMPTY: Final = Sequence(())
_EXIT: Final = -1


@functools.lru_cache(maxsize=KEPT_MAX)
def _automaton(patterns: tuple[str, ...]) -> Automaton:
    """Return the automaton of some expressions, each to be found."""
    return _built([searched(pattern) for pattern in patterns])


def _built(items: list[Item]) -> Automaton:
    chars = (at for item in items for at in walk(item) if isinstance(at, Chars))
    automaton = Automaton({}, Alphabet([ANY_CHAR, *chars]))
    try:
        for item in items:
            automaton.add(Lexeme(item))
    except TooLarge:
        raise PatternError("takes too large an automaton") from None
    return automaton


def is_found(pattern: str, text: str) -> bool:
    """Tell whether an expression is found in a text.

    Raises:
        PatternError: it is wrong, or cannot be served.
    """
    automaton = _automaton((pattern,))
    states = automaton.begin()
    for char in text:
        mask = automaton.alphabet.part_of(char)
        states = next((to for part, to in automaton.moves_of(states) if part & mask), frozenset())
    return automaton.ended(states)[0]


@functools.lru_cache(maxsize=KEPT_MAX)
def never_both(first: str, second: str) -> bool:
    """Tell whether no text has both expressions in it; no where that takes too long to tell.

    Raises:
        PatternError: one of them is wrong, or cannot be served.
    """
    automaton = _automaton((first, second))
    seen, todo = {automaton.begin()}, [automaton.begin()]
    while todo:
        states = todo.pop()
        if all(automaton.ended(states)):
            return False
        for _, after in automaton.moves_of(states):
            both = len({automaton.owner[state] for state in after}) == 2
            if both and after not in seen:
                if len(seen) == SUBSETS_MAX:
                    return False
                seen.add(after)
                todo.append(after)
    return True


def without(pattern: str) -> str:
    """Return an expression, in the library's notation, of the whole texts without `pattern`.

    Raises:
        PatternError: it is wrong, cannot be served, or its opposite is too large.
    """
    return _opposite(_automaton((pattern,)))


def without_texts(texts: Iterable[str]) -> str:
    """Return an expression, in the library's notation, of all texts but these.

    Raises:
        PatternError: it is too large.
    """
    options = tuple(
        Sequence(tuple(Chars(((ord(char), ord(char)),)) for char in text)) for text in texts
    )
    return _opposite(_built([Choice(options)]))


def _opposite(automaton: Automaton) -> str:
    edges = _Edges()
    names = {automaton.begin(): 0, frozenset[int](): 1}
    todo = [automaton.begin()]
    edges.add(1, 1, ANY_CHAR)
    edges.add(1, _EXIT, _EMPTY)
    while todo:
        states = todo.pop()
        rest = automaton.alphabet.mask(ANY_CHAR)
        if not automaton.ended(states)[0]:
            edges.add(names[states], _EXIT, _EMPTY)
        for part, after in automaton.moves_of(states):
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


class _Edges:
    """An automaton whose moves are expressions, from 0 to `_EXIT`; states are taken out of it."""

    def __init__(self) -> None:
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
                self.add(start, end, _bounded(_joined(way, *loop, item)))


def _joined(*items: Item) -> Item:
    parts = [at for i in items for at in (i.items if isinstance(i, Sequence) else (i,))]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _either(first: Item, second: Item) -> Item:
    options = [at for i in (first, second) for at in (i.items if isinstance(i, Choice) else (i,))]
    return Choice(tuple(dict.fromkeys(options)))


def _bounded(item: Item) -> Item:
    """Return an item, unless it is too large when written."""
    if sum(8 for _ in zip(walk(item), range(SIZE_MAX // 8 + 1), strict=False)) > SIZE_MAX:
        raise PatternError("its opposite is too large")
    return item
