r"""Write an EBNF grammar in the GBNF dialect in the library's own notation.

The dialect: `name ::= alternatives`, rule after rule, and `root` is where a text begins; `|`
between alternatives; literals in double quotes; classes such as `[a-z]` and `[^"\\]`; `.` for any
character; groups in parentheses; `*`, `+`, `?`, `{n}`, `{n,}` and `{n,m}` behind an item, which is
all of a literal; `#` begins a comment. Escapes: `\n \r \t \\ \" \[ \] \- \^ \xHH \uHHHH`, and
`\U` with eight digits. A rule ends with its line unless a group is open, the line ends in `::=` or
`|`, or the next one begins with `|`.

The library divides a text into lexemes, each as long as possible: `"ab" "ce" | "abcd"` would lose
"abce". Characters are never each other's beginnings, so a rule that may come back to itself is made
of single characters; what is regular as a whole is one lexeme.

Invariants:
- What is read is all of the text; whatever is left over or unknown is an error with its place.
- Sizes are bounded: rules, items, repetitions and depth each have a limit of their own.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn

from mlxd_worker.constraints.patterns import write_char

RULES_MAX: Final = 2000
ITEMS_MAX: Final = 50_000
REPEAT_MAX: Final = 2000
DEPTH_MAX: Final = 64
LEVELS_MAX: Final = 64
"""Of rules within a lexeme; what refers further is made of single characters."""

_MARK: Final = "@"
"""Before a rule's number, in what is written: whether it is a lexeme shows at the end."""
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_TOKEN: Final = re.compile(
    r'(?P<text>"(?:[^"\\\r\n]|\\[^\r\n])*")|(?P<set>\[(?:[^\]\\\r\n]|\\[^\r\n])*\])'
    r"|(?P<name>[A-Za-z0-9_-]+)|(?P<sign>::=|[().|])"
    r"|(?P<mark>[*+?]|\{[ \t]*([0-9]+)[ \t]*(?:(,)[ \t]*([0-9]*)[ \t]*)?\})|(?P<line>[\r\n]+)"
)
_BLANKS: Final = re.compile(r"(?:[ \t]+|#[^\r\n]*)*")
_CHAR: Final = re.compile(
    r'\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\\"\[\]^-]))|([^\\])',
    re.DOTALL,
)
_ANY: Final = r"/[\x{0}-\x{10FFFF}]/"
_LAST_CHAR: Final = 0x10FFFF


class GrammarError(ValueError):
    """A grammar that makes no sense, with the place where that shows."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        """Tell the place as line:column, from 1."""
        line = text.count("\n", 0, position) + 1
        column = position - (text.rfind("\n", 0, position) + 1) + 1
        super().__init__(f"{line}:{column}: {problem}")


def to_lark(text: str) -> str:
    """Return the grammar for the library; raises GrammarError, with line and column."""
    reader = _Reader(text)
    reader.read()
    kind = "T" if _is_regular(reader.uses) else "r"  # names of lexemes are in capitals
    lines = [f"{kind}{reader.names[name]}: {body}" for name, body in reader.rules.items()]
    return "\n".join([f"start: {_MARK}{reader.names['root']}", *lines, ""]).replace(_MARK, kind)


def _is_regular(uses: dict[str, set[str]]) -> bool:
    """Tell whether no rule comes back to itself, nor refers to others more than LEVELS_MAX deep."""
    done: set[str] = set()
    for _ in range(LEVELS_MAX):
        done |= {name for name, used in uses.items() if used <= done}
    return len(done) == len(uses)


class _Reader:
    """Reads a text once, front to back."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        """Where the next token begins, blanks and comments before it left out."""
        self._token: re.Match[str] | None = None
        self._items = 0
        self._depth = 0
        self._rule = ""
        self.rules: dict[str, str] = {}
        """The text of each rule."""
        self.uses: dict[str, set[str]] = {}
        """The rules that each rule refers to."""
        self.names: dict[str, int] = {}
        """The number of each rule that is there or referred to."""
        self._first: dict[str, int] = {}
        """Where each rule is first referred to."""
        self._look(0)

    def read(self) -> None:
        """Read all rules; raises GrammarError."""
        self._skip_lines()
        while self._at < len(self._text):
            start, name = self._at, self._take("name")
            if not name:
                self._refuse("a rule's name is needed")
            if name in self.rules:
                self._refuse(f"the rule {name!r} is there already", start)
            if len(self.rules) == RULES_MAX:
                self._refuse(f"more than {RULES_MAX} rules", start)
            if not self._take("sign", "::="):
                self._refuse("'::=' is needed after a rule's name")
            self._skip_lines()
            self._rule = name
            self.uses[name] = set()
            self._number(name)
            self.rules[name] = self._choice(nested=False)
            if self._at < len(self._text) and not self._take("line"):
                self._refuse(f"{self._text[self._at]!r} does not belong here")
            self._skip_lines()
        for name, position in self._first.items():
            if name not in self.rules:
                self._refuse(f"there is no rule {name!r}", position)
        if "root" not in self.rules:
            self._refuse("there is no rule 'root', where a text begins", 0)

    def _choice(self, *, nested: bool) -> str:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._refuse(f"groups more than {DEPTH_MAX} deep")
        options = [self._sequence(nested=nested)]
        while self._take_bar(nested=nested):
            options.append(self._sequence(nested=nested))
        self._depth -= 1
        return " | ".join(options)

    def _take_bar(self, *, nested: bool) -> bool:
        """Skip the next `|` of this choice, even on a later line; False if there is none."""
        before = self._at
        self._skip_lines()
        if self._take("sign", "|"):
            self._skip_lines()
            return True
        if not nested:
            self._look(before)
        return False

    def _sequence(self, *, nested: bool) -> str:
        items: list[str] = []
        while True:
            if nested:
                self._skip_lines()
            start, item = self._at, self._item()
            if not item:
                return " ".join(items) or '""'
            self._items += 1 if item[0] == "(" else 1 + item.count(" ")
            if self._items > ITEMS_MAX:
                self._refuse(f"more than {ITEMS_MAX} items", start)
            items.append(self._repeat(item))

    def _item(self) -> str:
        """Return the text of the next item; empty if there is none."""
        start = self._at
        if text := self._take("text"):
            chars = [f"/{write_char(code)}/" for code in self._codes(text[1:-1], start + 1)]
            return " ".join(chars) or '""'
        if text := self._take("set"):
            return self._set(text[1:-1], start)
        if name := self._take("name"):
            self._first.setdefault(name, start)
            self.uses[self._rule].add(name)
            return f"{_MARK}{self._number(name)}"
        if self._take("sign", "."):
            return _ANY
        if not self._take("sign", "("):
            return ""
        inner = self._choice(nested=True)
        if not self._take("sign", ")"):
            self._refuse("')' is needed here")
        return f"({inner})"

    def _repeat(self, item: str) -> str:
        """Apply the repetition after an item; after a literal it applies to all of it."""
        while self._token is not None and self._token.lastgroup == "mark":
            mark, low, comma, high = self._token.group("mark", 6, 7, 8)
            if low is not None:
                digits = max(len(low), len(high or ""))
                if digits > len(str(REPEAT_MAX)) or max(int(low), int(high or 0)) > REPEAT_MAX:
                    self._refuse(f"more than {REPEAT_MAX} repetitions")
                if high and int(high) < int(low):
                    self._refuse(f"{int(high)} is below {int(low)}")
                mark = f"{{{int(low)},{high if comma else int(low)}}}"
            self._take("mark")  # the library knows no repetition of at most 0
            item = '""' if re.fullmatch(r"\{0,0+\}", mark) else f"({item}){mark}"
        return item

    def _set(self, text: str, start: int) -> str:
        negated = text.startswith("^")
        codes = self._codes(text[negated:], start + 1 + negated)
        # Which sign is an escaped one shows by its place alone: `-` between two makes a range.
        places = [m.start() for m in _CHAR.finditer(text[negated:])]
        parts, index = [], 0
        while index < len(codes):
            low = high = codes[index]
            if index + 2 < len(codes) and text[negated:][places[index + 1]] == "-":
                index, high = index + 2, codes[index + 2]
            if high < low:
                self._refuse("a range that ends before it begins", start)
            parts.append(f"{write_char(low)}-{write_char(high)}")
            index += 1
        if parts == [f"{write_char(0)}-{write_char(_LAST_CHAR)}"] if negated else not parts:
            self._refuse("a class without any character", start)
        return f"/[{'^' * negated}{''.join(parts)}]/" if parts else _ANY

    def _codes(self, text: str, start: int) -> list[int]:
        """Return the code points that a text between its signs stands for."""
        codes: list[int] = []
        at = 0
        while at < len(text):
            match = _CHAR.match(text, at)
            if match is None:
                self._refuse(f"an unknown escape {text[at : at + 2]}", start + at)
            digits, sign = match[1] or match[2] or match[3], match[4]
            char = int(digits, 16) if digits else ord(_CONTROLS.get(sign, sign or match[5]))
            if char > _LAST_CHAR or 0xD800 <= char <= 0xDFFF:
                self._refuse(f"{match[0]!r} is not the number of a character", start + at)
            codes.append(char)
            at = match.end()
        return codes

    def _number(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _look(self, at: int) -> None:
        """Look at the token that comes next, behind blanks and comments."""
        blanks = _BLANKS.match(self._text, at)
        self._at = blanks.end() if blanks else at
        self._token = _TOKEN.match(self._text, self._at)

    def _take(self, kind: str, text: str = "") -> str:
        """Skip the next token if it is of this kind, and return it; otherwise return ""."""
        token = self._token
        if token is None or token.lastgroup != kind or (text and token[0] != text):
            return ""
        self._look(token.end())
        return token[0]

    def _skip_lines(self) -> None:
        while self._take("line"):
            pass

    def _refuse(self, problem: str, position: int | None = None) -> NoReturn:
        at = self._at if position is None else position
        if position is None and self._token is None and self._text[at : at + 1] in ('"', "["):
            problem = f"{self._text[at]!r} is not closed on its line"
        raise GrammarError(self._text, at, problem)
