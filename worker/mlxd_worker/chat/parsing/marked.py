"""Answers in which marks set reasoning and calls apart from text.

Text goes out as it comes, but for what may be the beginning of a mark, and for blanks, which
belong to the mark that follows them if one does. A call is held until it is whole.

Invariants:
- The time that an answer takes grows with its length, however it comes in pieces and whatever it
  holds: no character is looked for twice, and what is held is not copied with each piece.
"""

from __future__ import annotations

import enum

from mlxd_worker.chat.parsing.pieces import (
    Begin,
    CallSyntax,
    Piece,
    Said,
    Think,
    Tools,
    blank_end,
    overlap,
)


class _At(enum.Enum):
    START = "start"
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class MarkedParser:
    """One answer. `think` None: no reasoning; `calls` None: no calls."""

    def __init__(
        self,
        think: Think | None,
        calls: CallSyntax | None,
        tools: Tools,
        begin: Begin,
        *,
        held: bool = False,
    ) -> None:
        """Begin. held: whether JSON in calls is sound: a mark in a string is a part of that."""
        self._think = think
        self._calls = calls if tools.offered else None
        self._tools = tools
        self._held = ""
        self._place = 0
        """What stands before it in `_held` is read."""
        self._blanks: list[str] = []
        """Blanks read and not told: before what is held, or before the call at hand."""
        self._body: list[str] = []
        """What is read of the call at hand."""
        self._quotes = _Quotes() if held and calls is not None and calls.json else None
        self._fresh = begin.reasoning
        """Whether blanks at this place are dropped: behind a mark."""
        self._at = _At.TEXT
        if begin.reasoning:
            self._at = _At.REASONING
        elif think is not None and not begin.middle:
            self._at = _At.START

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return the pieces that are certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        self._held, self._place = self._held[self._place :], 0
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        pieces: list[Piece] = []
        if self._at is _At.CALL:
            self._body.append(self._held)
            self._end_call("", pieces, whole=False)
        else:
            self._say(self._held, pieces, reasoning=self._at is _At.REASONING)
        self._held = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Go as far as one mark; return whether there may be another."""
        match self._at:
            case _At.START:
                return self._start()
            case _At.REASONING:
                return self._reason(pieces)
            case _At.TEXT:
                return self._tell(pieces)
            case _At.CALL:
                return self._call(pieces)

    def _start(self) -> bool:
        assert self._think is not None
        opened, begin = self._think.open, blank_end(self._held, self._place)
        self._blanks.append(self._held[self._place : begin])
        self._place = begin
        if self._held.startswith(opened, begin):
            self._place += len(opened)
            self._blanks.clear()
            self._at, self._fresh = _At.REASONING, True
            return True
        if opened.startswith(self._held[begin : begin + len(opened)]):  # nothing yet, or a part
            return False
        self._at = _At.TEXT
        return True

    def _reason(self, pieces: list[Piece]) -> bool:
        assert self._think is not None
        if not self._say_to(self._think.close, pieces, reasoning=True):
            return False
        self._blanks.clear()
        self._at, self._fresh = _At.TEXT, True
        return True

    def _tell(self, pieces: list[Piece]) -> bool:
        opened = "" if self._calls is None else self._calls.open
        if not self._say_to(opened, pieces, reasoning=False):
            return False
        self._at = _At.CALL
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        assert self._calls is not None
        mark = self._calls.close or self._calls.open
        end = self._held.find(mark, self._place)
        if end < 0:
            sure = len(self._held) - overlap(self._held, mark)
            self._read_body(max(sure, self._place))
            return False
        self._read_body(end)
        if self._quotes is not None and self._quotes.are_open:
            self._read_body(end + 1)
            return True
        self._place = end + len(mark)
        self._end_call(self._calls.close or "", pieces, whole=True)
        if self._calls.close is not None:
            self._at = _At.TEXT
        return True

    def _read_body(self, end: int) -> None:
        piece, self._place = self._held[self._place : end], end
        self._body.append(piece)
        if self._quotes is not None:
            self._quotes.push(piece)

    def _end_call(self, close: str, pieces: list[Piece], *, whole: bool) -> None:
        assert self._calls is not None
        body = "".join(self._body)
        blank = "".join(self._blanks)
        self._body.clear()
        self._blanks.clear()
        readable = whole or self._calls.is_whole(body)
        calls = self._calls.read(body, self._tools) if readable else None
        if calls is None:
            pieces.append(Said(f"{blank}{self._calls.open}{body}{close}"))
        else:
            pieces += calls
        self._fresh = calls is not None

    def _say(self, text: str, pieces: list[Piece], *, reasoning: bool) -> None:
        """Say a text, and the blanks before it."""
        text = "".join((*self._blanks, text))
        self._blanks.clear()
        text = text.lstrip() if self._fresh else text
        if text:
            self._fresh = False
            pieces.append(Said(text, reasoning=reasoning))

    def _say_to(self, mark: str, pieces: list[Piece], *, reasoning: bool) -> bool:
        """Say what stands before `mark` and go behind it, or as far as is sure; return which.

        Blanks at the end are not told yet. An empty mark is none.
        """
        end = self._held.find(mark, self._place) if mark else -1
        met = end >= 0
        if not met:
            end = max(len(self._held) - overlap(self._held, mark), self._place)
        body = self._held[self._place : end]
        text = body.rstrip()
        if text:
            self._say(text, pieces, reasoning=reasoning)
        self._blanks.append(body[len(text) :])
        self._place = end + len(mark) if met else end
        return met


class _Quotes:
    """Whether a JSON text, as far as it is read, ends within a string."""

    def __init__(self) -> None:
        self.are_open = False
        self._is_escaped = False

    def push(self, text: str) -> None:
        """Take the next text."""
        for char in text:
            if self._is_escaped:
                self._is_escaped = False
            elif char == '"':
                self.are_open = not self.are_open
            else:
                self._is_escaped = self.are_open and char == "\\"
