"""GLM 4.5 and later: a name, then <arg_key> and <arg_value> in turn, in a <tool_call>."""

from __future__ import annotations

import re
from typing import Final

from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, between, make_call

_NAME: Final = re.compile(r"\s*([^\s<]+)\s*")


def _decode(body: str, tools: Tools) -> list[Called] | None:
    match = _NAME.match(body)
    if match is None:
        return None
    name, place = match[1], match.end()
    arguments: dict[str, object] = {}
    while key := between(body, place, "<arg_key>", "</arg_key>"):
        value = between(body, key[1], "<arg_value>", "</arg_value>")
        if value is None:
            return None
        parameter = key[0].strip()
        arguments[parameter] = tools.value(name, parameter, value[0])
        place = value[1]
    call = None if body[place:].strip() else make_call(name, arguments)
    return None if call is None else [call]


SYNTAX = CallSyntax("<tool_call>", "</tool_call>", _decode, last=None)
