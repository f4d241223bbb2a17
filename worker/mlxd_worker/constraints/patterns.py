r"""Translate regular expressions of ECMA-262, which JSON Schema means, to the library's dialect.

The library reads the syntax of Rust's regex crate, in which some texts mean something else:
`[[:alpha:]]`, `[a&&b]`, `\<`, `\z`, `(?x)`; `.` and `\s` differ in a few characters. So an
expression is read for what it means and written anew, its characters as ranges of numbers.

Invariants:
- What is written matches a text as a whole, and means the same in every dialect.
- `^` and `$` are the text's ends; they stand where nothing else can come before, or behind.
"""

from __future__ import annotations

from typing import Final

from mlxd_worker.constraints.grammar_tree import (
    Chars,
    Choice,
    Item,
    Name,
    Repeat,
    Sequence,
    inverted,
    names_in,
    nullable,
)
from mlxd_worker.constraints.pattern_reader import BEGIN, END, PatternError, read_pattern

_ANYTHING: Final = Repeat(Chars(inverted(())), 0, None)
_EMPTY: Final = Sequence(())
SIZE_MAX: Final = 1 << 20
"""Characters of an expression as it is written."""


def search_pattern(pattern: str) -> str:
    """Return an expression for the texts that `pattern` is found in, to be matched as a whole.

    It is for strings of JSON, and matches what is left by `quotable`.

    Raises:
        PatternError: it is wrong, or cannot be served; with the place.
    """
    return written(quotable(searched(pattern)))


def name_pattern(pattern: str) -> str:
    """Return an expression for names, of which others are those that it does not match.

    Raises:
        PatternError: it is wrong, or cannot be served; with the place.
    """
    item = searched(pattern)
    if quotable(item) != item:
        raise PatternError('a class with control characters, but without " or \\, in a name')
    return written(item)


def searched(pattern: str) -> Item:
    """Return the tree of the whole texts that `pattern` is found in.

    Raises:
        PatternError: it is wrong, or cannot be served; with the place.
    """
    return _checked(_anchored(read_pattern(pattern), _ANYTHING))


def whole_pattern(pattern: str) -> str:
    """Return an expression for the texts that `pattern` matches from end to end.

    Raises:
        PatternError: it is wrong, or cannot be served; with the place.
    """
    return written(_checked(_anchored(read_pattern(pattern), _EMPTY)))


def literal_pattern(texts: tuple[str, ...]) -> str:
    """Return an expression that matches exactly the given texts."""
    return "|".join("".join(rf"\x{{{ord(char):X}}}" for char in text) for text in texts)


def quotable(item: Item) -> Item:
    """Return a tree without U+001F in classes that leave out a quotation mark or a backslash.

    Where the library writes a class in JSON that holds all control characters, it lets all escapes
    through, those two among them.

    Raises:
        PatternError: nothing is left of a class.
    """
    match item:
        case Chars():
            return item if all(_has(item, char) for char in '"\\') else _without_last(item)
        case Sequence():
            return Sequence(tuple(map(quotable, item.items)))
        case Choice():
            return Choice(tuple(map(quotable, item.items)))
        case Repeat():
            return Repeat(quotable(item.item), item.low, item.high)
        case _:
            return item


def _has(chars: Chars, char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in chars.ranges)


def _without_last(chars: Chars) -> Chars:
    """Return a class without the last control character."""
    if not _has(chars, "\x1f"):
        return chars
    ranges = [
        part
        for low, high in chars.ranges
        for part in ((low, min(high, 0x1E)), (max(low, 0x20), high))
        if part[0] <= part[1]
    ]
    if not ranges:
        raise PatternError("U+001F by itself is not served")
    return Chars(tuple(ranges))


def _checked(item: Item) -> Item:
    if names_in(item):
        raise PatternError("^ and $ are served where a text begins and ends, and nowhere else")
    return item


def written(item: Item) -> str:
    """Return a tree as an expression in the library's notation.

    Raises:
        PatternError: it is too long.
    """
    text = _written(item)
    if len(text) > SIZE_MAX:
        raise PatternError(f"takes more than {SIZE_MAX} characters, written out")
    return text


def _written(item: Item) -> str:
    match item:
        case Chars():
            return _written_chars(item)
        case Sequence():
            return "".join(map(_written, item.items))
        case Choice():
            return f"(?:{'|'.join(map(_written, item.items))})"
        case Repeat():
            inner, high = f"(?:{_written(item.item)})", "" if item.high is None else item.high
            marks = {(0, ""): "*", (1, ""): "+", (0, 1): "?"}
            return inner + (marks.get((item.low, high)) or f"{{{item.low},{high}}}")
        case _:
            raise AssertionError("not part of an expression")


def _written_chars(chars: Chars) -> str:
    parts = (
        rf"\x{{{low:X}}}" if low == high else rf"\x{{{low:X}}}-\x{{{high:X}}}"
        for low, high in chars.ranges
    )
    return f"[{''.join(parts)}]"


def _anchored(item: Item, outside: Item) -> Item:
    """Return an item that matches whole texts; `outside` is what may be where no anchor stands."""
    return _open_end(_open_begin(item, outside), outside)


def _open_begin(item: Item, outside: Item) -> Item:
    """Let `outside` come before an item, but where `^` begins it."""
    items = _sequence_of(item)
    if items and items[0] == BEGIN:
        return _open_begin(Sequence(items[1:]), _EMPTY)
    options = _options_with(items[0], BEGIN) if items else ()
    if options:
        joined = (_joined(option, *items[1:]) for option in options)
        return Choice(tuple(_open_begin(option, outside) for option in joined))
    return _joined(outside, *items)


def _open_end(item: Item, outside: Item) -> Item:
    """Let `outside` come behind an item, but where `$` ends it."""
    items = _sequence_of(item)
    if END in items and all(map(_may_be_empty, items[items.index(END) :])):
        items = items[: items.index(END) + 1]  # what is behind the end is nothing
    if items and items[-1] == END:
        return _open_end(Sequence(items[:-1]), _EMPTY)
    options = _options_with(items[-1], END) if items else ()
    if options:
        joined = (_joined(*items[:-1], option) for option in options)
        return Choice(tuple(_open_end(option, outside) for option in joined))
    return _joined(*items, outside)


def _may_be_empty(item: Item) -> bool:
    return nullable(item, {END.rule})


def _sequence_of(item: Item) -> tuple[Item, ...]:
    return item.items if isinstance(item, Sequence) else (item,)


def _joined(*items: Item) -> Item:
    """Return items one after the other, without sequences in sequences at the edges."""
    return Sequence(tuple(inner for item in items for inner in _sequence_of(item)))


def _options_with(item: Item, anchor: Name) -> tuple[Item, ...]:
    """Return what a choice or an optional part may be, where an anchor is in it; else nothing."""
    if anchor.rule not in names_in(item):
        return ()
    match item:
        case Choice():
            return item.items
        case Repeat(inner, 0, 1):
            return (inner, _EMPTY)
        case Sequence():
            return (item,)
        case _:
            return ()
