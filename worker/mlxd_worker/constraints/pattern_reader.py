"""Read a regular expression of ECMA-262 into a tree.

Invariants:
- What is read is all of the expression. What no automaton can do (look-around, back references,
  word boundaries) and what ECMA-262 does not know is refused by name and place.
- A needless escape of a sign is the sign; a brace that bounds nothing is itself.
"""

from __future__ import annotations

import functools
import sys
import unicodedata
from typing import Final

from mlxd_worker.constraints.grammar_tree import (
    CODE_POINTS,
    SURROGATES,
    Chars,
    Choice,
    Item,
    Name,
    Ranges,
    Repeat,
    Sequence,
    inverted,
    merged,
)

PATTERN_CHARS_MAX: Final = 1 << 16
DEPTH_MAX: Final = 100
REPEAT_MAX: Final = 100_000
CATEGORIES_KEPT_MAX: Final = 64

BEGIN: Final = Name("^")
"""Stands for the text's begin in a tree."""
END: Final = Name("$")

_DIGITS: Final[Ranges] = ((0x30, 0x39),)
_WORD: Final[Ranges] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Final[Ranges] = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: Final[Ranges] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES: Final = {
    "d": _DIGITS, "D": inverted(_DIGITS), "w": _WORD, "W": inverted(_WORD),
    "s": _SPACE, "S": inverted(_SPACE),
}  # fmt: skip
_CONTROLS: Final = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_HEX_DIGITS: Final = {"x": 2, "u": 4}
_DOT: Final = Chars(inverted(_LINE_ENDS))
_SIGNS: Final[dict[str, Item]] = {"^": BEGIN, "$": END, ".": _DOT}
_REFUSED_GROUPS: Final = {
    "?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind",
}  # fmt: skip


class PatternError(ValueError):
    """An expression that is wrong or cannot be served."""


def read_pattern(pattern: str) -> Item:
    """Return the tree of an expression; the anchors in it are `BEGIN` and `END`.

    Raises:
        PatternError: naming the character's place, from 1.
    """
    if len(pattern) > PATTERN_CHARS_MAX:
        raise PatternError(f"an expression of more than {PATTERN_CHARS_MAX} characters")
    return _Reader(pattern).read()


class _Reader:
    """Reads an expression once, front to back."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Item:
        """Return the tree of all of it."""
        item = self._choice()
        if self._at < len(self._text):
            raise self._error("a ) that closes nothing")
        return item

    def _choice(self) -> Item:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"groups more than {DEPTH_MAX} deep")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Item:
        items: list[Item] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._repeated(self._atom()))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self, item: Item) -> Item:
        bounds = self._bounds()
        if bounds is None:
            return item
        if item in (BEGIN, END):
            raise self._error("nothing to repeat")
        self._take("?")  # as few as possible: of whole texts that is all the same
        if self._peek() in ("*", "+", "?") or self._braces() is not None:
            raise self._error("nothing to repeat")
        return Repeat(item, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        return self._braces()

    def _braces(self) -> tuple[int, int | None] | None:
        """Take {n}, {n,} or {n,m}; any other brace stands for itself and is left."""
        end = self._text.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not _is_number(low) or not (high == "" or _is_number(high)):
            return None
        start, self._at = self._at, end + 1
        if max(len(low), len(high)) > len(str(REPEAT_MAX)) or int(high or low) > REPEAT_MAX:
            raise self._error(f"more than {REPEAT_MAX} repetitions", start)
        least, most = int(low), int(high) if high else (None if comma else int(low))
        if most is not None and most < least:
            raise self._error(f"{most} is below {least}", start)
        return least, most

    def _atom(self) -> Item:
        start = self._at
        char = self._next()
        if char in _SIGNS:
            return _SIGNS[char]
        match char:
            case "(":
                return self._group(start)
            case "[":
                return self._class(start)
            case "\\":
                found = self._escape(start, in_class=False)
                return Chars(found if isinstance(found, tuple) else ((found, found),))
            case "*" | "+" | "?":
                raise self._error("nothing to repeat", start)
        return Chars(((self._code(char, start),) * 2,))

    def _group(self, start: int) -> Item:
        for mark, name in _REFUSED_GROUPS.items():
            if self._text.startswith(mark, self._at):
                raise self._error(f"{name} is not served", start)
        if self._take("?") and not self._take(":"):
            end = self._text.find(">", self._at)
            name = self._text[self._at : end] if self._take("<") and end > 0 else ""
            if not name.isidentifier():
                raise self._error("a group of an unknown kind", start)
            self._at = end + 1
        item = self._choice()
        if not self._take(")"):
            raise self._error("a group that is not closed", start)
        return item

    def _class(self, start: int) -> Item:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            ranges += self._class_part(start)
        found = inverted(merged(ranges)) if negated else merged(ranges)
        if not found:
            raise self._error("a class without any character", start)
        return Chars(found)

    def _class_part(self, start: int) -> Ranges:
        """Return what the next member of a class stands for: a character, a range or a class."""
        low = self._member(start)
        if isinstance(low, tuple):
            return low
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return ((low, low),)
        before = self._at
        self._at += 1
        high = self._member(start)
        if isinstance(high, tuple):  # the sign is itself
            self._at = before
            return ((low, low),)
        if high < low:
            raise self._error("a range that ends before it begins", before)
        return ((low, high),)

    def _member(self, start: int) -> int | Ranges:
        at = self._at
        if at >= len(self._text):
            raise self._error("a class that is not closed", start)
        char = self._next()
        return self._escape(at, in_class=True) if char == "\\" else self._code(char, at)

    def _escape(self, start: int, *, in_class: bool) -> int | Ranges:
        """Return the character or the class that an escape stands for."""
        name = self._next()
        if name in _CLASSES:
            return _CLASSES[name]
        if name in ("p", "P"):
            return self._property(start, negated=name == "P")
        if name in _HEX_DIGITS:
            return self._hex(name, start)
        return self._control(name, start, in_class=in_class)

    def _control(self, name: str, start: int, *, in_class: bool) -> int:
        """Return the one character that an escape stands for, by its name or as a sign."""
        if name == "b" and in_class:
            return 0x08
        if name in _CONTROLS and not (name == "0" and self._peek().isdecimal()):
            return _CONTROLS[name]
        if name == "c" and self._peek().isascii() and self._peek().isalpha():
            return ord(self._next()) % 32
        if name == "" or name.isalnum():
            raise self._error(_unknown_escape(name), start)
        return self._code(name, start)

    def _hex(self, name: str, start: int) -> int:
        if name == "u" and self._take("{"):
            end = self._text.find("}", self._at)
            code = _number(self._text[self._at : max(end, 0)])
            self._at = end + 1
        else:
            code = self._digits(_HEX_DIGITS[name])
            if SURROGATES[0] <= code < 0xDC00 and self._text.startswith("\\u", self._at):
                before, self._at = self._at, self._at + 2
                low = self._digits(4)
                if 0xDC00 <= low <= SURROGATES[1]:
                    return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
                self._at = before
        if not 0 <= code < CODE_POINTS:
            raise self._error("an escape that is no number of a character", start)
        if SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._error("half of a pair, which no text holds", start)
        return code

    def _digits(self, count: int) -> int:
        text = self._text[self._at : self._at + count]
        self._at += count
        return _number(text) if len(text) == count else -1

    def _property(self, start: int, *, negated: bool) -> Ranges:
        end = self._text.find("}", self._at)
        if not self._take("{") or end < 0:
            raise self._error("a property needs its name in braces", start)
        name = self._text[self._at : end]
        self._at = end + 1
        found = category_ranges(_CATEGORIES.get(name, name.rpartition("=")[2]))
        if not found:
            raise self._error(f"the property {name[:40]!r} is not served", start)
        return inverted(found) if negated else found

    def _code(self, char: str, start: int) -> int:
        code = ord(char)
        if SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._error("half of a pair, which no text holds", start)
        return code

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        self._at += len(char)
        return char

    def _take(self, mark: str) -> bool:
        found = self._peek() == mark
        self._at += found
        return found

    def _error(self, problem: str, position: int | None = None) -> PatternError:
        place = (self._at if position is None else position) + 1
        return PatternError(f"{problem}, at character {place} of the expression")


_CATEGORIES: Final = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S"}


@functools.lru_cache(maxsize=CATEGORIES_KEPT_MAX)
def category_ranges(name: str) -> Ranges:
    """Return the characters of a general category such as L or Lu; nothing where there is none."""
    if not 1 <= len(name) <= 2:
        return ()
    codes = (c for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)).startswith(name))
    return merged((code, code) for code in codes)


def _unknown_escape(name: str) -> str:
    """Return what to say of an escape that is not served."""
    if name in ("b", "B"):
        return "word boundaries are not served"
    if name == "k" or (name.isdecimal() and name != "0"):
        return "back references are not served"
    return f"an unknown escape \\{name}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _number(text: str) -> int:
    """Return a number of hexadecimal digits, or -1."""
    return int(text, 16) if text.isascii() and text.isalnum() and _is_hex(text) else -1


def _is_hex(text: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in text)
