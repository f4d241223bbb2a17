"""JSON objects of many members, read without keeping everybody else waiting.

Python reads a text of JSON in one step, during which no other thread runs: 100 MiB of it would
hold a server's event loop for seconds, on whatever thread they were read.

Invariants:
- What is large is read member by member. One step takes at most PIECE_CHARS_MAX characters; what is
  longer and no object of members itself is refused.
- What is small is read as everywhere else.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mlxd_models.files.model_files import parse_json_object
from mlxd_shared.config import JSON_MEMBERS_MAX
from mlxd_shared.domain.errors import InvalidModel

SMALL_NBYTES = 1 << 18
PIECE_CHARS_MAX = 1 << 22
_PIECES = (1 << 12, 1 << 16, 1 << 20, PIECE_CHARS_MAX)
_DEPTH_MAX = 2
"""Of objects within objects that are read member by member."""
_SPACES_MAX = 1 << 16
_SPACE = re.compile(rf"[ \t\n\r]{{0,{_SPACES_MAX}}}")
_SURROGATE_ESCAPE = "\\ud"
_decoder = json.JSONDecoder()


def parse_large_object(raw: bytes, *, file: str) -> dict[str, Any]:
    """Return the object that `raw` spells, as `parse_json_object` does.

    Raises:
        InvalidModel: not UTF-8, not JSON, not an object, half a character in a text, a value that
            is too long, or over JSON_MEMBERS_MAX members of one object.
    """
    if len(raw) <= SMALL_NBYTES:
        return parse_json_object(raw, file=file)
    try:
        return _Reader(raw.decode("utf-8-sig"), file).whole()
    except (ValueError, RecursionError) as error:  # both errors of Unicode are ValueErrors
        raise InvalidModel(f"not JSON: {error}", file=file) from error


class _Incomplete(Exception):
    """A piece of the text ends within a value."""


class _Reader:
    """Goes through one text."""

    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self._file = file

    def whole(self) -> dict[str, Any]:
        at = self._next(0)
        if not self._text.startswith("{", at):
            raise InvalidModel("not a JSON object", file=self._file)
        value, at = self._object(at, _DEPTH_MAX)
        at = self._next(at)
        if at < len(self._text):
            raise _error_of("the end", at)
        return value

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        """Return the object that begins at `at`, and where it ends."""
        text, members, count = self._text, dict[str, Any](), 0
        at = self._next(at + 1)
        if text.startswith("}", at):
            return members, at + 1
        while True:
            if not text.startswith('"', at):
                raise _error_of("a name", at)
            name, at = self._value(at, 0)
            at = self._next(self._past(":", self._next(at)))
            members[name], at = self._value(at, depth - 1)
            count += 1  # a name that comes again is read once more, too
            if count > JSON_MEMBERS_MAX:
                problem = f"over {JSON_MEMBERS_MAX} members of one object"
                raise InvalidModel(problem, file=self._file)
            at = self._next(at)
            if text.startswith("}", at):
                return members, at + 1
            at = self._next(self._past(",", at))

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """Return the value that begins at `at`, and where it ends."""
        for chars in _PIECES:
            try:
                return self._piece(at, chars)
            except _Incomplete:
                if depth > 0 and self._text.startswith("{", at):
                    return self._object(at, depth)
        problem = f"a value of over {PIECE_CHARS_MAX} characters, at character {at}"
        raise InvalidModel(problem, file=self._file)

    def _piece(self, at: int, chars: int) -> tuple[Any, int]:
        """Return the same where the value ends within so many characters."""
        piece = self._text[at : at + chars]
        more = at + chars < len(self._text)
        try:
            value, end = _decoder.raw_decode(piece)
        except json.JSONDecodeError as error:
            if more:
                raise _Incomplete from error
            raise _error_of(error.msg, at + error.pos) from error
        if more and end == len(piece):  # a number may go on
            raise _Incomplete
        spelt = piece[:end]
        if _SURROGATE_ESCAPE in spelt.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value, at + end

    def _next(self, at: int) -> int:
        """Return where the next character stands that is no space."""
        while True:
            match = _SPACE.match(self._text, at)
            assert match is not None
            if match.end() - at < _SPACES_MAX:
                return match.end()
            at = match.end()

    def _past(self, mark: str, at: int) -> int:
        if not self._text.startswith(mark, at):
            raise _error_of(repr(mark), at)
        return at + 1


def _error_of(wanted: str, at: int) -> ValueError:
    return ValueError(f"{wanted} was expected at character {at}")
