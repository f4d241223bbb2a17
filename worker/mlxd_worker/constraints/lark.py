"""Write a grammar that is divided into lexemes in the library's own notation."""

from __future__ import annotations

from collections.abc import Callable

from mlxd_worker.constraints.grammar_tree import (
    Chars,
    Choice,
    Item,
    Lexeme,
    Name,
    Repeat,
    Rules,
    Sequence,
)
from mlxd_worker.constraints.lexemes import START, divided


def to_lark(rules: Rules) -> str:
    """Return the notation of a grammar; the text is about as long as the grammar's."""
    return _Writer(rules).text()


class _Writer:
    """Writes rules once, each under a name of its own."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._parts = divided(rules)
        self._names = {name: f"r{index}" for index, name in enumerate(self._parts)}
        self._terminals: dict[Item, str] = {}
        self._lines: list[str] = []

    def text(self) -> str:
        lines = [f"{self._names[name]}: {self._node(item)}" for name, item in self._parts.items()]
        return "\n".join([f"start: {self._names[START]}", *lines, *self._lines, ""])

    def _node(self, item: Item) -> str:
        match item:
            case Lexeme():
                return self._terminal(item.item)
            case Name():
                return self._names[item.rule]
            case _:
                return _composed(item, self._node)

    def _terminal(self, item: Item) -> str:
        """Return the name of a lexeme, or of a rule within one, written down once."""
        found = self._terminals.get(item)
        if found is None:
            found = self._terminals[item] = f"T{len(self._terminals)}"
            self._lines.append(f"{found}: {self._regular(item)}")
        return found

    def _regular(self, item: Item) -> str:
        match item:
            case Chars():
                return f"/{_class(item)}/"
            case Name():
                return self._terminal(self._rules[item.rule])
            case _:
                return _composed(item, self._regular)


def _composed(item: Item, write: Callable[[Item], str]) -> str:
    """Return an item that is made of others, each written by `write`."""
    match item:
        case Sequence():
            return " ".join(map(write, item.items)) if item.items else '""'
        case Choice():
            return f"({' | '.join(map(write, item.items))})"
        case Repeat():
            inner = f"({write(item.item)})"
            if (item.low, item.high) == (0, 1):
                return f"{inner}?"
            if item.high is None and item.low < 2:
                return inner + ("+" if item.low else "*")
            high = "" if item.high is None else item.high
            return f"{inner}{{{item.low},{high}}}"
        case _:
            raise AssertionError("a leaf")


def _class(chars: Chars) -> str:
    """Return characters as a class, all of them by their numbers."""
    return "[" + "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in chars.ranges) + "]"
