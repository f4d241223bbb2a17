r"""Read an EBNF grammar in the GBNF dialect into a tree of rules.

The dialect: `name ::= alternatives`, rule after rule, and `root` is where a text begins; `|`
between alternatives; literals in double quotes; classes such as `[a-z]` and `[^"\\]`; `.` for any
character; groups in parentheses; `*`, `+`, `?`, `{n}`, `{n,}` and `{n,m}` behind an item, which is
all of a literal; `#` begins a comment. Escapes: `\n \r \t \\ \" \[ \] \- \^ \xHH \uHHHH`, and
`\U` with eight digits. A rule ends with its line unless a group is open, the line ends in `::=` or
`|`, or the next one begins with `|`.

Invariants:
- What is read is all of the text; whatever is left over or unknown is an error with its place.
- Sizes are bounded: rules, items, repetitions and depth each have a limit of their own.
"""

from __future__ import annotations

from typing import Final

from mlxd_worker.constraints.grammar_tree import (
    ANY_CHAR,
    CODE_POINTS,
    SURROGATES,
    Chars,
    Choice,
    Item,
    Name,
    Repeat,
    Sequence,
    inverted,
    merged,
)

RULES_MAX: Final = 2000
ITEMS_MAX: Final = 50_000
REPEAT_MAX: Final = 2000
DEPTH_MAX: Final = 64

_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '\\"[]-^'}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


class GrammarError(ValueError):
    """A grammar that makes no sense, with the place where that shows."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        """Tell the place as line:column, from 1."""
        line = text.count("\n", 0, position) + 1
        column = position - (text.rfind("\n", 0, position) + 1) + 1
        super().__init__(f"{line}:{column}: {problem}")


def read_grammar(text: str) -> dict[str, Item]:
    """Return the rules of a grammar by name, `root` among them, each name that is used defined.

    Raises:
        GrammarError: naming line and column.
    """
    reader = _Reader(text)
    reader.read()
    for name, position in reader.used.items():
        if name not in reader.rules:
            raise GrammarError(text, position, f"there is no rule {name!r}")
    if "root" not in reader.rules:
        raise GrammarError(text, 0, "there is no rule 'root', where a text begins")
    return reader.rules


class _Reader:
    """Reads a text once, front to back."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.rules: dict[str, Item] = {}
        self.used: dict[str, int] = {}
        """The names used, and where first."""
        self._at = 0
        self._items = 0
        self._depth = 0

    def read(self) -> None:
        """Read all rules."""
        self._space(lines=True)
        while self._at < len(self.text):
            start = self._at
            name = self._name()
            if name in self.rules:
                raise self._error(f"the rule {name!r} is there already", start)
            if len(self.rules) == RULES_MAX:
                raise self._error(f"more than {RULES_MAX} rules", start)
            self._space(lines=False)
            if not self.text.startswith("::=", self._at):
                raise self._error("'::=' is needed behind a rule's name")
            self._at += 3
            self._space(lines=True)
            self.rules[name] = self._choice(nested=False)
            self._end_of_rule()

    def _end_of_rule(self) -> None:
        self._space(lines=False)
        if self._at < len(self.text) and self.text[self._at] not in "\r\n":
            raise self._error(f"{self.text[self._at]!r} does not belong here")
        self._space(lines=True)

    def _choice(self, *, nested: bool) -> Item:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"groups more than {DEPTH_MAX} deep")
        options = [self._sequence(nested=nested)]
        while self._bar(nested=nested):
            self._at += 1
            self._space(lines=True)
            options.append(self._sequence(nested=nested))
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _bar(self, *, nested: bool) -> bool:
        """Go to the next `|` of this choice, maybe on a line below; False where there is none."""
        before = self._at
        self._space(lines=True)
        if self._peek() == "|":
            return True
        if not nested:
            self._at = before
        return False

    def _sequence(self, *, nested: bool) -> Item:
        items: list[Item] = []
        while True:
            self._space(lines=nested)
            start = self._at
            found = self._atom()
            if found is None:
                break
            self._items += len(found.items) if isinstance(found, Sequence) else 1
            if self._items > ITEMS_MAX:
                raise self._error(f"more than {ITEMS_MAX} items", start)
            items.append(self._repeated(found))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self, item: Item) -> Item:
        """Apply what stands behind an item; behind a literal it concerns all of it."""
        while (bounds := self._bounds()) is not None:
            item = Repeat(item, *bounds)
        return item

    def _bounds(self) -> tuple[int, int | None] | None:
        match self._peek():
            case "*":
                self._at += 1
                return 0, None
            case "+":
                self._at += 1
                return 1, None
            case "?":
                self._at += 1
                return 0, 1
            case "{":
                self._at += 1
                return self._braces()
            case _:
                return None

    def _braces(self) -> tuple[int, int | None]:
        start = self._at
        self._space(lines=False)
        low = self._number()
        self._space(lines=False)
        high: int | None = low
        if self._peek() == ",":
            self._at += 1
            self._space(lines=False)
            high = None if self._peek() == "}" else self._number()
            self._space(lines=False)
        self._expect("}")
        if high is not None and high < low:
            raise self._error(f"{high} is below {low}", start)
        return low, high

    def _number(self) -> int:
        start = self._at
        while self._peek().isdecimal() and self._peek().isascii():
            self._at += 1
        digits = self.text[start : self._at]
        if not digits:
            raise self._error("a number is needed")
        if len(digits) > len(str(REPEAT_MAX)) or int(digits) > REPEAT_MAX:
            raise self._error(f"more than {REPEAT_MAX} repetitions", start)
        return int(digits)

    def _atom(self) -> Item | None:
        char = self._peek()
        match char:
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return ANY_CHAR
            case "(":
                self._at += 1
                inner = self._choice(nested=True)
                self._space(lines=True)
                self._expect(")")
                return inner
        if not _is_name_char(char):
            return None
        start = self._at
        name = self._name()
        self.used.setdefault(name, start)
        return Name(name)

    def _literal(self) -> Item:
        start = self._at
        self._at += 1
        chars: list[Item] = []
        while self._peek() != '"':
            code = self._char(start)
            chars.append(Chars(((code, code),)))
        self._at += 1
        return chars[0] if len(chars) == 1 else Sequence(tuple(chars))

    def _class(self) -> Chars:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = self._char(start)
            high = low
            if self._peek() == "-" and self.text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._char(start)
            if high < low:
                raise self._error("a range that ends before it begins")
            ranges.append((low, high))
        self._at += 1
        found = merged(ranges)
        if negated:
            found = inverted(found)
        if not found:
            raise self._error("a class without any character", start)
        return Chars(found)

    def _char(self, start: int) -> int:
        """Return the next character's code point."""
        char = self._peek()
        if char in ("", "\n", "\r"):
            raise self._error("is not closed on its line", start)
        self._at += 1
        if char != "\\":
            return ord(char)
        name = self._peek()
        self._at += 1
        if name in _ESCAPES and name:
            return ord(_ESCAPES[name])
        if name in _HEX_DIGITS and name:
            return self._hex(_HEX_DIGITS[name])
        raise self._error(f"an unknown escape \\{name}", self._at - 2)

    def _hex(self, digits: int) -> int:
        text = self.text[self._at : self._at + digits]
        try:
            code = int(text, 16) if len(text) == digits and text.isalnum() else -1
        except ValueError:
            code = -1
        if not 0 <= code < CODE_POINTS or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._error(f"{text!r} is not the number of a character in {digits} digits")
        self._at += digits
        return code

    def _name(self) -> str:
        start = self._at
        while _is_name_char(self._peek()):
            self._at += 1
        if start == self._at:
            raise self._error("a rule's name is needed")
        return self.text[start : self._at]

    def _space(self, *, lines: bool) -> None:
        """Skip blanks and comments; with `lines` the ends of lines as well."""
        while char := self._peek():
            if char == "#":
                while self._peek() not in ("", "\n", "\r"):
                    self._at += 1
            elif char in " \t" or (lines and char in "\r\n"):
                self._at += 1
            else:
                return

    def _peek(self) -> str:
        return self.text[self._at : self._at + 1]

    def _expect(self, char: str) -> None:
        if self._peek() != char:
            raise self._error(f"{char!r} is needed here")
        self._at += 1

    def _error(self, problem: str, position: int | None = None) -> GrammarError:
        return GrammarError(self.text, self._at if position is None else position, problem)


def _is_name_char(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char in "-_") and bool(char)
