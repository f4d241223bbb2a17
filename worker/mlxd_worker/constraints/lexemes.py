"""Divide a grammar into lexemes such that reading the longest one never loses a text.

The library reads the longest lexeme that fits and never goes back. An EBNF grammar knows nothing of
lexemes: to read every character alone is exact, and slow. So parts that are regular become lexemes
where that changes nothing.

Invariants:
- Two lexemes never compete: where one is complete, and may be followed by a character, no lexeme
  that fits as well goes on with that character. Hence the longest one is the right one.
- A lexeme is never empty.
- What competes is taken apart, down to single characters, which cannot compete: no character is the
  beginning of another.
"""

from __future__ import annotations

from typing import Final, TypeVar

from mlxd_worker.constraints.automaton import Alphabet, Automaton, TooLarge
from mlxd_worker.constraints.grammar_tree import (
    Chars,
    Choice,
    Item,
    Lexeme,
    Name,
    Repeat,
    Rules,
    Sequence,
    inner_items,
    names_in,
    nullable,
    nullable_rules,
    recursive_rules,
    walk,
)

START: Final = "root"
_Key = TypeVar("_Key", Lexeme, str)


def divided(rules: Rules) -> dict[str, Item]:
    """Return the rules that `root` needs, with lexemes for leaves."""
    apart: set[Item] = set()
    while True:
        parts = _Division(rules, apart).rules()
        found = _to_take_apart(rules, parts)
        if not found:
            return parts
        assert not found <= apart, "a lexeme was taken apart and is still there"
        apart |= found


class _Division:
    """One try: everything regular is a lexeme, but for what has to be taken apart."""

    def __init__(self, rules: Rules, apart: set[Item]) -> None:
        self._rules = rules
        self._apart = apart
        self._recursive = recursive_rules(rules, START)
        self._nullable = nullable_rules(rules)

    def rules(self) -> dict[str, Item]:
        """Return the rules by name, those alone that are reached from the start."""
        done: dict[str, Item] = {}
        todo = [START]
        while todo:
            name = todo.pop()
            if name not in done:
                done[name] = self._divide(self._rules[name])
                todo += sorted(_open_names(done[name]))
        return done

    def _divide(self, item: Item) -> Item:
        if isinstance(item, Chars) or self._is_lexeme(item):
            return Lexeme(item)
        match item:
            case Sequence():
                return Sequence(tuple(self._divide(inner) for inner in item.items))
            case Choice():
                return Choice(tuple(self._divide(inner) for inner in item.items))
            case Repeat():
                return self._divide_repeat(item)
            case Name() | Lexeme() | Chars():
                return item

    def _divide_repeat(self, item: Repeat) -> Item:
        """Divide a repetition; one that may be empty is an option, or else a lexeme of its own."""
        if item.low == 0 and item not in self._apart:
            least = Repeat(item.item, 1, item.high)
            if item.high != 0 and self._is_lexeme(least):
                return Repeat(Lexeme(least), 0, 1)
        return Repeat(self._divide(item.item), item.low, item.high)

    def _is_lexeme(self, item: Item) -> bool:
        return (
            item not in self._apart
            and not nullable(item, self._nullable)
            and not names_in(item) & self._recursive
        )


def _open_names(item: Item) -> set[str]:
    """Return the rules that an item refers to outside of its lexemes."""
    found: set[str] = set()
    todo = [item]
    while todo:
        at = todo.pop()
        if isinstance(at, Name):
            found.add(at.rule)
        elif not isinstance(at, Lexeme):
            todo += inner_items(at)
    return found


def _to_take_apart(rules: Rules, parts: dict[str, Item]) -> set[Item]:
    """Return the lexemes that compete with another, or are too large to tell."""
    lexemes = list(dict.fromkeys(at for item in parts.values() for at in _lexemes_in(item)))
    if len(lexemes) == 1 and isinstance(parts[START], Lexeme):
        return set()  # nothing ever follows it
    alphabet = Alphabet(at for item in rules.values() for at in walk(item) if isinstance(at, Chars))
    automaton = Automaton(rules, alphabet)
    try:
        for lexeme in lexemes:
            automaton.add(lexeme)
    except TooLarge as error:
        return {error.lexeme.item}
    follow = _Follow(parts, {lexeme: automaton.first(i) for i, lexeme in enumerate(lexemes)})
    found = automaton.competitors({i: follow.of(lexeme) for i, lexeme in enumerate(lexemes)})
    if found is None:
        return {lexeme.item for lexeme in lexemes if not isinstance(lexeme.item, Chars)}
    return {lexemes[i].item for i in found}


def _lexemes_in(item: Item) -> list[Lexeme]:
    found: list[Lexeme] = []
    todo = [item]
    while todo:
        at = todo.pop()
        if isinstance(at, Lexeme):
            found.append(at)
        else:
            todo += inner_items(at)
    return found


class _Follow:
    """Which characters may come behind each lexeme, one bit for each part of the alphabet."""

    def __init__(self, parts: dict[str, Item], first_of: dict[Lexeme, int]) -> None:
        self._first_of = first_of
        self._nullable = nullable_rules(parts)
        self._first = dict.fromkeys(parts, 0)
        self._behind = dict.fromkeys(parts, 0)
        self._found = dict.fromkeys(first_of, 0)
        self._settle_first(parts)
        self._changed = True
        while self._changed:
            self._changed = False
            for name, item in parts.items():
                self._visit(item, self._behind[name])

    def of(self, lexeme: Lexeme) -> int:
        """Return the characters that may come behind a lexeme."""
        return self._found[lexeme]

    def _settle_first(self, parts: dict[str, Item]) -> None:
        while True:
            new = {name: self._first_in(item) for name, item in parts.items()}
            if new == self._first:
                return
            self._first = new

    def _first_in(self, item: Item) -> int:
        match item:
            case Lexeme():
                return self._first_of[item]
            case Name():
                return self._first[item.rule]
            case Sequence():
                found = 0
                for inner in item.items:
                    found |= self._first_in(inner)
                    if not nullable(inner, self._nullable):
                        break
                return found
            case _:
                found = 0
                for inner in inner_items(item):
                    found |= self._first_in(inner)
                return found

    def _visit(self, item: Item, behind: int) -> None:
        """Note that `behind` may come behind an item, and what that means for what is in it."""
        match item:
            case Lexeme():
                self._changed |= _grown(self._found, item, behind)
            case Name():
                self._changed |= _grown(self._behind, item.rule, behind)
            case Sequence():
                for inner in reversed(item.items):
                    self._visit(inner, behind)
                    first = self._first_in(inner)
                    behind = behind | first if nullable(inner, self._nullable) else first
            case Choice():
                for inner in item.items:
                    self._visit(inner, behind)
            case Repeat():
                again = 0 if item.high == 1 else self._first_in(item.item)
                self._visit(item.item, behind | again)
            case Chars():
                raise AssertionError("characters are in lexemes")


def _grown(sets: dict[_Key, int], key: _Key, more: int) -> bool:
    """Add to one of the sets; return whether that was news."""
    news = more & ~sets[key]
    sets[key] |= news
    return bool(news)
