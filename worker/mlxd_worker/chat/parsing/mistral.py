"""Mistral: behind [TOOL_CALLS] a JSON list of calls, or a name, [ARGS] and a JSON object."""

from __future__ import annotations

import json
import re
from typing import Final

from mlxd_shared.domain.chats import json_object
from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, call_of, make_call

_NAMED: Final = re.compile(
    r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL
)


def _decode(body: str, _: Tools) -> list[Called] | None:
    try:
        if body.lstrip().startswith("["):
            return _calls_in(json.loads(body))
        match = _NAMED.fullmatch(body)
        call = None if match is None else make_call(match[1], json_object(match[2]))
    except (ValueError, RecursionError):
        return None
    return None if call is None else [call]


def _calls_in(items: list[object]) -> list[Called] | None:
    calls = [call for item in items if (call := call_of(item)) is not None]
    return calls if calls and len(calls) == len(items) else None


SYNTAX = CallSyntax("[TOOL_CALLS]", None, _decode)
MARKS = ("[ARGS]", "[CALL_ID]")
