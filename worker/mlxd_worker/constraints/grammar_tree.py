"""An EBNF grammar as a tree: rules by name, characters at the leaves, or lexemes.

Invariants:
- Ranges of characters are sorted, disjoint, inclusive, not empty, and without surrogates.
- Items are values: equal ones are the same part of a grammar, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

CODE_POINTS: Final = 0x110000
SURROGATES: Final = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of some ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Name:
    """What another rule stands for."""

    rule: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One item after the other; none is the empty text."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the items."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item `low` to `high` times; None is without bound."""

    item: Item
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A regular part that is read as one."""

    item: Item


Item = Chars | Name | Sequence | Choice | Repeat | Lexeme
Rules = Mapping[str, Item]


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges sorted and joined, without surrogates."""
    parts: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if parts and low <= parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], max(parts[-1][1], high))
        else:
            parts.append((low, high))
    return tuple(part for whole in parts for part in _without_surrogates(*whole))


def inverted(ranges: Ranges) -> Ranges:
    """Return the characters that are in none of the ranges."""
    result, start = [], 0
    for low, high in ranges:
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    if start < CODE_POINTS:
        result.append((start, CODE_POINTS - 1))
    return merged(result)


def _without_surrogates(low: int, high: int) -> list[tuple[int, int]]:
    first, last = SURROGATES
    if high < first or low > last:
        return [(low, high)]
    return [part for part in ((low, first - 1), (last + 1, high)) if part[0] <= part[1]]


ANY_CHAR: Final = Chars(inverted(()))


def inner_items(item: Item) -> tuple[Item, ...]:
    """Return the items that an item is made of; a rule's name is made of nothing."""
    match item:
        case Sequence() | Choice():
            return item.items
        case Repeat() | Lexeme():
            return (item.item,)
        case Chars() | Name():
            return ()


def walk(item: Item) -> Iterator[Item]:
    """Yield an item and everything in it, lexemes' insides included."""
    todo = [item]
    while todo:
        at = todo.pop()
        yield at
        todo += inner_items(at)


def names_in(item: Item) -> set[str]:
    """Return the rules that an item refers to by itself."""
    return {at.rule for at in walk(item) if isinstance(at, Name)}


def reachable(rules: Rules, start: str) -> dict[str, set[str]]:
    """Return, for each rule that a text of `start` may go through, the rules that it refers to."""
    found: dict[str, set[str]] = {}
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = names_in(rules[name])
            todo += found[name]
    return found


def recursive_rules(rules: Rules, start: str) -> frozenset[str]:
    """Return the rules that come back to themselves, or refer to one that does."""
    references = reachable(rules, start)
    regular: set[str] = set()
    while True:
        more = {name for name, used in references.items() if used <= regular} - regular
        if not more:
            return frozenset(references) - regular
        regular |= more


def nullable_rules(rules: Rules) -> frozenset[str]:
    """Return the rules that may stand for the empty text."""
    found: set[str] = set()
    while True:
        more = {name for name, item in rules.items() if nullable(item, found)} - found
        if not more:
            return frozenset(found)
        found |= more


def nullable(item: Item, rules: frozenset[str] | set[str]) -> bool:
    """Return whether an item may be empty, given the rules that may be."""
    match item:
        case Chars():
            return False
        case Name():
            return item.rule in rules
        case Sequence():
            return all(nullable(inner, rules) for inner in item.items)
        case Choice():
            return any(nullable(inner, rules) for inner in item.items)
        case Repeat():
            return item.low == 0 or nullable(item.item, rules)
        case Lexeme():
            return nullable(item.item, rules)
