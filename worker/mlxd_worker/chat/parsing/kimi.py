"""Kimi K2: a section of calls, each with its id (functions.NAME:INDEX) and JSON arguments."""

from __future__ import annotations

import re
from typing import Final

from mlxd_shared.domain.chats import json_object
from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, make_call

_OPEN: Final = "<|tool_call_begin|>"
_CLOSE: Final = "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_CALL: Final = re.compile(
    rf"\s*{re.escape(_OPEN)}\s*(?:functions\.)?([^\s:<]+)(?::\d+)?\s*{re.escape(_ARGUMENTS)}"
    rf"(.*?)(?:{re.escape(_CLOSE)}|\Z)\s*",
    re.DOTALL,
)


def _decode(body: str, _: Tools) -> list[Called] | None:
    calls: list[Called] = []
    place = 0
    while match := _CALL.match(body, place):
        try:
            call = make_call(match[1], json_object(match[2]))
        except ValueError:
            return None
        if call is None:
            return None
        calls.append(call)
        place = match.end()
    return calls if calls and not body[place:].strip() else None


SYNTAX = CallSyntax("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _decode)
MARKS = (_OPEN, _CLOSE, _ARGUMENTS)
