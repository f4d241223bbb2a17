r"""Write regular expressions of ECMA-262, which JSON Schema means, in the library's dialect.

The library reads the syntax of Rust's regex crate, in which some texts mean something else:
`[[:alpha:]]`, `[a&&b]`, `\<`, `\z`, `(?x)`, `{,2}`; `.` and `\s` differ in a few characters. So an
expression is read sign by sign and written anew, its characters by their numbers.

Invariants:
- What is read is all of the expression. What no automaton can do (look-around, back references,
  word boundaries) and what ECMA-262 does not know is refused by name and place.
- `^` and `$` are left where nothing else can come before, or behind: there the library takes them
  for the text's ends. Elsewhere they are refused.
- In strings of JSON, what only `\u` can spell is in no class, and refused by itself: `compiler`
  does not allow that escape, and the library leaves such a character out of a text, rather than
  refuse the text. Where a class holds all control characters, but not `"` or `\`, the library lets
  all escapes through, those two among them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NoReturn

PATTERN_CHARS_MAX: Final = 1 << 16
DEPTH_MAX: Final = 100
REPEAT_MAX: Final = 100_000
CODE_POINTS: Final = 0x110000
SURROGATES: Final = (0xD800, 0xDFFF)

_SPACE: Final = (
    r"\x{9}-\x{D}\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
    r"\x{FEFF}"
)
_CLASSES: Final = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Z_a-z]", "W": "[^0-9A-Z_a-z]",
    "s": f"[{_SPACE}]", "S": f"[^{_SPACE}]",
}  # fmt: skip
_NO_LINE_END: Final = r"[^\x{A}\x{D}\x{2028}\x{2029}]"
_UNWRITABLE: Final = r"--[\x{0}-\x{7}\x{B}\x{E}-\x{1F}\x{7F}]"
_ANYTHING: Final = r"[\x{0}-\x{10FFFF}]"
_CONTROLS: Final = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_GROUPS: Final = {
    "(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind",
}  # fmt: skip
_TOKEN: Final = re.compile(
    r"(?P<group>\((?:\?(?:[:=!]|<[=!]|<[^\W\d]\w*>))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<mark>(?:[*+?]|\{([0-9]+)(?:,([0-9]*))?\})\??)|(?P<end>[\^$])|(?P<dot>\.)"
    r"|(?P<set>\[\^?)|(?P<char>.)",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(
    r"\\(?:(?P<set>[dDwWsS])|(?P<category>[pP]\{[^}]*\})|x(?P<x>[0-9a-fA-F]{2})"
    r"|u(?P<u>[0-9a-fA-F]{4})|u\{(?P<code>[0-9a-fA-F]{1,8})\}|c(?P<control>[A-Za-z])"
    r"|(?P<nul>0)(?![0-9])|(?P<name>[tnvfr])|(?P<sign>[^0-9A-Za-z]))",
    re.DOTALL,
)
_CATEGORY: Final = re.compile(
    r"([pP]\{)(?:(?:General_Category|gc)=)?((?:C[cfo]?|L[lmotu]?|M[cen]?|N[dlo]?|P[cdefios]?"
    r"|S[ckmo]?|Z[lps]?|Letter|Number|Punctuation|Symbol)\})"
)


class PatternError(ValueError):
    """An expression that is wrong or cannot be served."""


def search_pattern(pattern: str) -> str:
    """Return an expression, with its anchors, that is found in the same strings of JSON.

    Raises:
        PatternError: it is wrong, or cannot be served; naming the character's place, from 1.
    """
    return _Writer(pattern, in_json=True).write()


def whole_pattern(pattern: str) -> str:
    """Return an expression for texts that `pattern` matches whole; raises as `search_pattern`."""
    return f"(?:{_Writer(pattern, in_json=False).write()})"


def is_unwritable(code: int) -> bool:
    r"""Tell whether only `\u` spells a character in a string of JSON, as the library has it."""
    return (code < ord(" ") and chr(code) not in "\b\t\n\f\r") or code == 0x7F


def literal_pattern(texts: tuple[str, ...]) -> str:
    """Return an expression that matches exactly the given texts."""
    return "|".join("".join(map(write_char, map(ord, text))) for text in texts)


@dataclass(slots=True)
class _Group:
    """What is known of a group that is open, or of the whole."""

    begins: bool = False
    """Whether `^` is in it, so that nothing may come before it."""
    ends: bool = False
    """Whether `$` is in it, so that nothing may come behind it."""
    is_empty: bool = True
    """Whether its last alternative has nothing in it."""
    is_over: bool = False
    """Whether its last alternative has come to its `$`."""


class _Writer:
    """Reads an expression once, front to back."""

    def __init__(self, text: str, *, in_json: bool) -> None:
        self._text = text
        self._in_json = in_json
        self._at = 0
        self._groups = [_Group()]
        self._starts = [0]
        self._repeats = False
        """Whether what has been read last may be repeated."""

    def write(self) -> str:
        """Return all of it."""
        if len(self._text) > PATTERN_CHARS_MAX:
            raise PatternError(f"an expression of more than {PATTERN_CHARS_MAX} characters")
        parts: list[str] = []
        while match := _TOKEN.match(self._text, self._at):
            start, self._at = self._at, match.end()
            parts.append(self._read(match, start))
        if len(self._groups) > 1:
            self._refuse("a group that is not closed", self._starts[-1])
        return "".join(parts)

    def _read(self, match: re.Match[str], start: int) -> str:
        text = match[0]
        match match.lastgroup:
            case "group":
                return self._open(text, start)
            case "close":
                return self._close(start)
            case "bar":
                self._groups[-1].is_empty, self._groups[-1].is_over = True, False
                self._repeats = False
                return text
            case "mark":
                return self._mark(match, start)
            case "end":
                self._add(start, begins=text == "^", ends=text == "$")
                return text
            case "dot":
                result = _NO_LINE_END
            case "set":
                result = self._set(start, text)
            case _:
                result = self._member(text, start)
                if self._in_json and result.startswith("\\x") and is_unwritable(_number(result)):
                    self._refuse("a control character, which no output has", start)
                if self._in_json and result.startswith(("\\p", "\\P")):
                    result = f"[[{result}]{_UNWRITABLE}]"
        self._add(start)
        return result

    def _add(self, start: int, *, begins: bool = False, ends: bool = False) -> None:
        """Note an item of the group that is open."""
        group = self._groups[-1]
        if group.is_over or (begins and not group.is_empty):
            problem = "^ and $ are served where a text begins and ends, and nowhere else"
            self._refuse(problem, start)
        group.begins, group.ends = group.begins or begins, group.ends or ends
        group.is_empty, group.is_over = False, ends
        self._repeats = not begins and not ends

    def _open(self, text: str, start: int) -> str:
        if text in _GROUPS:
            self._refuse(f"{_GROUPS[text]} is not served", start)
        if text == "(" and self._text[self._at : self._at + 1] == "?":
            self._refuse("a group of an unknown kind", start)
        if len(self._groups) > DEPTH_MAX:
            self._refuse(f"groups more than {DEPTH_MAX} deep", start)
        self._groups.append(_Group())
        self._starts.append(start)
        self._repeats = False
        return "(?:"

    def _close(self, start: int) -> str:
        if len(self._groups) == 1:
            self._refuse("a ) that closes nothing", start)
        group = self._groups.pop()
        self._add(self._starts.pop(), begins=group.begins, ends=group.ends)
        return ")"

    def _mark(self, match: re.Match[str], start: int) -> str:
        low, high = match[5], match[6]
        if not self._repeats:
            self._refuse("nothing to repeat", start)
        if max(len(low or ""), len(high or "")) > len(str(REPEAT_MAX)):
            self._refuse(f"more than {REPEAT_MAX} repetitions", start)
        if low and int(high or low) > REPEAT_MAX:
            self._refuse(f"more than {REPEAT_MAX} repetitions", start)
        if high and int(high) < int(low):
            self._refuse(f"{high} is below {low}", start)
        self._repeats = False
        if low and self._in_json and self._at == len(self._text):
            return f"{{{int(low)}}}"  # anything may follow, more of them too
        return match[0].removesuffix("?") or "?"  # as few as possible is all the same

    def _set(self, start: int, opening: str) -> str:
        """Return a class of characters, which is read up to its end."""
        parts: list[str] = []
        while (char := self._next()) != "]":
            if not char:
                self._refuse("a class that is not closed", start)
            at = self._at - 1
            part = self._member(char, at, in_set=True)
            if self._text.startswith("-", self._at) and not part.startswith(("[", "\\p", "\\P")):
                dash, self._at = self._at, self._at + 1
                high = self._next()
                text = "" if high in ("", "]") else self._member(high, dash + 1, in_set=True)
                if not text.startswith("\\x"):  # the sign is itself
                    self._at = dash
                elif _number(text) < _number(part):
                    self._refuse("a range that ends before it begins", dash)
                else:
                    part = f"{part}-{text}"
            parts.append(part)
        if not parts and opening == "[":
            self._refuse("a class without any character", start)
        if not parts:
            return _ANYTHING
        return f"[{opening}{''.join(parts)}]{_UNWRITABLE if self._in_json else ''}]"

    def _member(self, char: str, start: int, *, in_set: bool = False) -> str:
        """Return a character, or the class that an escape stands for."""
        if char != "\\":
            return self._code(ord(char), start)
        match = _ESCAPE.match(self._text, start)
        if match is None:
            name = self._text[start + 1 : start + 2]
            if name == "b" and in_set:
                self._at = start + 2
                return write_char(0x08)
            self._refuse(_escape_problem(name), start)
        self._at = match.end()
        kind, text = match.lastgroup or "", match[match.lastgroup or 0]
        if kind == "set":
            return _CLASSES[text]
        if kind == "category":
            known = _CATEGORY.fullmatch(text)
            if known is None:
                self._refuse(f"the property {text[2:-1][:40]!r} is not served", start)
            return f"\\{known[1]}{known[2]}"
        return self._code(_escaped_code(kind, text), start)

    def _code(self, code: int, start: int) -> str:
        if SURROGATES[0] <= code <= SURROGATES[1]:
            self._refuse("half of a pair, which no text holds", start)
        if code >= CODE_POINTS:
            self._refuse("an escape that is not the number of a character", start)
        return write_char(code)

    def _next(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += len(char)
        return char

    def _refuse(self, problem: str, position: int) -> NoReturn:
        raise PatternError(f"{problem}, at character {position + 1} of the expression")


def _escaped_code(kind: str, text: str) -> int:
    """Return the code point that an escape stands for, by its group in `_ESCAPE`."""
    match kind:
        case "control":
            return ord(text) % 32
        case "nul":
            return 0
        case "name":
            return _CONTROLS[text]
        case "sign":
            return ord(text)
    return int(text, 16)


def _escape_problem(name: str) -> str:
    """Return what to say of an escape that is not served."""
    if name in ("b", "B"):
        return "word boundaries are not served"
    if name == "k" or name.isdecimal():
        return "back references are not served"
    return f"an unknown escape \\{name}"


def write_char(code: int) -> str:
    """Return a character as the library's expressions have it by its number."""
    return rf"\x{{{code:X}}}"


def _number(text: str) -> int:
    """Return the number of a character that is written."""
    return int(text[3:-1], 16)
