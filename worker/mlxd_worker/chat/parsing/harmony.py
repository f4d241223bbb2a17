"""gpt-oss: messages with a header (channel, recipient) and a body, one after the other.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

The channel analysis is reasoning, final is text, and a recipient makes a message a call. A call is
held until it is whole. The time that an answer takes grows with its length, whatever it holds.
"""

from __future__ import annotations

import re
from typing import Final

from mlxd_shared.domain.chats import json_object
from mlxd_worker.chat.parsing.pieces import Begin, Called, Piece, Said, Tools, make_call, overlap

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MARKS: Final = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
_STOPS: Final = (*ENDS, START, CHANNEL)
_STOP: Final = re.compile("|".join(map(re.escape, _STOPS)))
_HEADERS: Final = (START, CHANNEL, " to=", "to=", MESSAGE)
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_NAMED_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_HEADER: Final = 1024


class HarmonyParser:
    """One answer, from behind `<|start|>assistant`, or from within a final message."""

    def __init__(self, tools: Tools, begin: Begin) -> None:
        self._tools = tools
        self._held = ""
        self._place = 0
        """What stands before it in `_held` is read."""
        self._body: list[str] = []
        """What is read of the call at hand."""
        self._header: str | None = MESSAGE if begin.middle else None
        """What opened the body at hand; None within a header."""

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return the pieces that are certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._read_header(pieces) if self._header is None else self._read_body(pieces):
            pass
        self._held, self._place = self._held[self._place :], 0
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        pieces: list[Piece] = []
        if self._header is None:
            self._say(self._held if self._held.strip() else "", pieces)
        else:
            self._end(self._held, "", pieces)
        self._held = ""
        return pieces

    def _read_header(self, pieces: list[Piece]) -> bool:
        begin = self._place
        text = self._held[begin : begin + _LONGEST_HEADER + len(MESSAGE)]
        if text and not any(
            text.startswith(header) or header.startswith(text) for header in _HEADERS
        ):
            self._header = MESSAGE  # none: what comes is text
            return True
        end = text.find(MESSAGE)
        if end >= 0:
            self._place += end + len(MESSAGE)
            self._header = text[: end + len(MESSAGE)]
            return True
        if len(text) < _LONGEST_HEADER + len(MESSAGE):
            return False
        self._header = MESSAGE
        self._place += 1
        self._say(text[:1], pieces)
        return True

    def _read_body(self, pieces: list[Piece]) -> bool:
        met = _STOP.search(self._held, self._place)
        if met is not None:
            stop = met[0] if met[0] in ENDS else ""
            self._end(self._held[self._place : met.start()], stop, pieces)
            self._place = met.start() + len(stop)
            self._header = None
            return True
        beginning = max(overlap(self._held, stop) for stop in _STOPS)
        sure = max(len(self._held) - beginning, self._place)
        text, self._place = self._held[self._place : sure], sure
        if self._calls:
            self._body.append(text)
        else:
            self._say(text, pieces)
        return False

    def _end(self, body: str, stop: str, pieces: list[Piece]) -> None:
        body = "".join((*self._body, body))
        self._body.clear()
        call = self._call(body) if self._calls else None
        if call is not None:
            pieces.append(call)
        elif self._calls:
            pieces.append(Said(f"{self._header}{body}{stop}"))
        else:
            self._say(body, pieces)

    @property
    def _recipient(self) -> str:
        match = _RECIPIENT.search(self._header or "")
        return match[1] if match else ""

    @property
    def _calls(self) -> bool:
        """Whether the message at hand is for a tool."""
        return bool(self._recipient) and self._recipient != "all"

    def _call(self, body: str) -> Called | None:
        if not self._tools.offered:
            return None
        try:
            return make_call(self._recipient.removeprefix("functions."), json_object(body))
        except ValueError:
            return None

    def _say(self, text: str, pieces: list[Piece]) -> None:
        channel = _NAMED_CHANNEL.search(self._header or "")
        if text:
            pieces.append(Said(text, reasoning=channel is not None and channel[1] == "analysis"))
