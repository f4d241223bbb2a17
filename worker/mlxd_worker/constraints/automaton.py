"""One finite automaton over all lexemes of a grammar, to see which of them compete.

Invariants:
- Characters are told apart only as far as the grammar does: one bit of an int stands for each part
  of the alphabet that all of its ranges treat alike.
- Sizes are bounded: `TooLarge` names the lexeme that did not fit any more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from mlxd_worker.constraints.grammar_tree import (
    CODE_POINTS,
    Chars,
    Choice,
    Item,
    Lexeme,
    Name,
    Repeat,
    Rules,
    Sequence,
    merged,
)

STATES_MAX: Final = 8000
SUBSETS_MAX: Final = 8000


class TooLarge(Exception):
    """A lexeme that has no place in the automaton."""

    def __init__(self, lexeme: Lexeme) -> None:
        super().__init__(lexeme)
        self.lexeme = lexeme


class Alphabet:
    """The parts of the alphabet that some ranges tell apart, one bit each."""

    def __init__(self, items: Iterable[Chars]) -> None:
        edges = {0, CODE_POINTS}
        for item in items:
            for low, high in item.ranges:
                edges |= {low, high + 1}
        self._edges = sorted(edges)
        self._masks: dict[Chars, int] = {}

    def mask(self, chars: Chars) -> int:
        """Return the parts that `chars` is made of."""
        found = self._masks.get(chars)
        if found is None:
            found = 0
            for low, high in chars.ranges:
                first, last = bisect_left(self._edges, low), bisect_left(self._edges, high + 1)
                found |= (1 << last) - (1 << first)
            self._masks[chars] = found
        return found

    def part_of(self, char: str) -> int:
        """Return the part that a character belongs to."""
        return 1 << (bisect_right(self._edges, ord(char)) - 1)

    def chars(self, mask: int) -> Chars:
        """Return the characters of some parts."""
        pairs = zip(self._edges, self._edges[1:], strict=False)
        return Chars(merged((low, end - 1) for i, (low, end) in enumerate(pairs) if mask >> i & 1))


@dataclass(slots=True)
class Automaton:
    """States are numbers; `moves[s]` are (characters, next state), `skips[s]` cost no character."""

    rules: Rules
    alphabet: Alphabet
    moves: list[list[tuple[int, int]]] = field(default_factory=list)
    skips: list[list[int]] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """Which lexeme each state belongs to."""
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, lexeme: Lexeme) -> None:
        """Add a lexeme, as the next number.

        Raises:
            TooLarge: there would be too many states.
        """
        try:
            start = self._state()
            end = self._build(lexeme.item, start)
        except OverflowError:
            raise TooLarge(lexeme) from None
        self.starts.append(start)
        self.ends.append(end)

    def first(self, lexeme: int) -> int:
        """Return the characters that a lexeme may begin with."""
        return self._outgoing(self._closure({self.starts[lexeme]}))

    def competitors(self, follow: Mapping[int, int]) -> set[int] | None:
        """Return the lexemes that go on where another is complete and may be followed so.

        follow: by lexeme, the characters that may come behind it. None where there are too many
        sets of states to look at.
        """
        end_of = {state: lexeme for lexeme, state in enumerate(self.ends)}
        begin = self.begin()
        seen, todo = {begin}, [begin]
        found: set[int] = set()
        while todo:
            subset = todo.pop()
            if subset is not begin:
                behind = 0
                for state in subset:
                    if state in end_of:
                        behind |= follow[end_of[state]]
                found |= {
                    self.owner[state]
                    for state in subset
                    for chars, _ in self.moves[state]
                    if chars & behind
                }
            for _, after in self.moves_of(subset):
                if after not in seen:
                    if len(seen) == SUBSETS_MAX:
                        return None
                    seen.add(after)
                    todo.append(after)
        return found

    def begin(self) -> frozenset[int]:
        """Return the states in which nothing has been read yet."""
        return self._closure(set(self.starts))

    def moves_of(self, subset: frozenset[int]) -> list[tuple[int, frozenset[int]]]:
        """Return where a character leads to, with those characters; each of them once."""
        moves = [move for state in subset for move in self.moves[state]]
        return [
            (part, self._closure({target for chars, target in moves if chars & part}))
            for part in _split(chars for chars, _ in moves)
        ]

    def ended(self, subset: frozenset[int]) -> list[bool]:
        """Return, for each lexeme, whether a text that leads to these states is one."""
        return [end in subset for end in self.ends]

    def _outgoing(self, subset: Iterable[int]) -> int:
        found = 0
        for state in subset:
            for chars, _ in self.moves[state]:
                found |= chars
        return found

    def _closure(self, states: set[int]) -> frozenset[int]:
        found, todo = set(states), list(states)
        while todo:
            for state in self.skips[todo.pop()]:
                if state not in found:
                    found.add(state)
                    todo.append(state)
        return frozenset(found)

    def _state(self) -> int:
        if len(self.moves) == STATES_MAX:
            raise OverflowError
        self.moves.append([])
        self.skips.append([])
        self.owner.append(len(self.starts))
        return len(self.moves) - 1

    def _build(self, item: Item, start: int) -> int:
        """Add what leads from `start` through an item; return where it ends."""
        match item:
            case Chars():
                end = self._state()
                self.moves[start].append((self.alphabet.mask(item), end))
                return end
            case Name():
                return self._build(self.rules[item.rule], start)
            case Lexeme():
                return self._build(item.item, start)
            case Sequence():
                for inner in item.items:
                    start = self._build(inner, start)
                return start
            case Choice():
                end = self._state()
                for inner in item.items:
                    begin = self._state()
                    self.skips[start].append(begin)
                    self.skips[self._build(inner, begin)].append(end)
                return end
            case Repeat():
                return self._build_repeat(item, start)

    def _build_repeat(self, item: Repeat, start: int) -> int:
        for _ in range(item.low):
            start = self._build(item.item, start)
        if item.high is None:
            loop = self._state()
            self.skips[start].append(loop)
            self.skips[self._build(item.item, loop)].append(loop)
            end = self._state()
            self.skips[loop].append(end)
            return end
        ends = [start]
        for _ in range(item.high - item.low):
            begin = self._state()
            self.skips[start].append(begin)
            start = self._build(item.item, begin)
            ends.append(start)
        end = self._state()
        for state in ends:
            self.skips[state].append(end)
        return end


def _split(masks: Iterable[int]) -> list[int]:
    """Return disjoint parts such that each mask is made of whole ones."""
    parts: list[int] = []
    for mask in set(masks):
        rest, cut = mask, []
        for part in parts:
            common = part & rest
            if common and common != part:
                cut += [common, part & ~common]
            else:
                cut.append(part)
            rest &= ~common
        parts = [*cut, rest] if rest else cut
    return parts
