"""One answer as its client is told of it: numbered parts, and calls with ids.

Invariants:
- What it says after some text depends on that text alone, so a resumed stream continues with
  the same parts: the text before is read again, and not told again.
- An id is made of the request's and of the call's place, so it is the same on any worker.
"""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass
from typing import Final

from mlxd_shared.domain.chats import ToolCall
from mlxd_worker.chat.parsing.pieces import Called, Parser, Piece, Said

_LETTERS: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9
"""What the strictest of templates takes."""


@dataclass(frozen=True, slots=True)
class PartPiece:
    """A piece of the part of this index; a call is whole, and then `text` is empty."""

    index: int
    text: str = ""
    reasoning: bool = False
    call: ToolCall | None = None


class Answer:
    """One answer. One owner: its stream's task."""

    def __init__(self, parser: Parser, request_id: str) -> None:
        self._parser = parser
        self._request_id = request_id
        self._index = -1
        self._last: tuple[type[Piece], bool] | None = None
        self._calls = 0

    def read(self, text: str, *, ends: bool) -> tuple[PartPiece, ...]:
        """Take the next text; return the pieces that are certain, all where the answer ends."""
        pieces = self._parser.push(text)
        if ends:
            pieces += self._parser.finish()
        return tuple(map(self._number, pieces))

    def _number(self, piece: Piece) -> PartPiece:
        match piece:
            case Said(text, reasoning):
                kind: tuple[type[Piece], bool] = (Said, reasoning)
                if kind != self._last:
                    self._index += 1
                self._last = kind
                return PartPiece(self._index, text, reasoning)
            case Called(name, arguments_json):
                self._index += 1
                self._last = None
                self._calls += 1
                call = ToolCall(name, arguments_json, self._id(self._calls))
                return PartPiece(self._index, call=call)

    def _id(self, number: int) -> str:
        seed = hashlib.sha256(f"{self._request_id}:{number}".encode()).digest()
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in seed[:_ID_CHARS])
