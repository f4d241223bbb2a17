"""Qwen3-Coder: <function=NAME> with a <parameter=NAME> for each argument, in a <tool_call>."""

from __future__ import annotations

import re
from typing import Final

from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, make_call

_END: Final = "</function>"
_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>")
_PARAMETER_END: Final = "</parameter>"


def _decode(body: str, tools: Tools) -> list[Called] | None:
    function = _FUNCTION.match(body)
    if function is None:
        return None
    name, place = function[1], function.end()
    arguments: dict[str, object] = {}
    while match := _PARAMETER.match(body, place):
        end = body.find(_PARAMETER_END, match.end())
        if end < 0:
            return None
        value = body[match.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[match[1]] = tools.value(name, match[1], value)
        place = end + len(_PARAMETER_END)
    rest = body[place:].strip()
    call = make_call(name, arguments) if rest in ("", _END) else None
    return None if call is None else [call]


SYNTAX = CallSyntax("<tool_call>", "</tool_call>", _decode, last=_END)
