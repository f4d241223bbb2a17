"""DeepSeek V3.2 and later: calls as elements, each argument in one of its own that tells its kind.

    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>

A value is text as it is where it is a string, else JSON. V3.2 and V4 call the whole by other names.
"""

# ruff: noqa: RUF001, RUF002 - the letter is the model's

from __future__ import annotations

import json
import re
from typing import Any, Final

from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, between, make_call

MARK: Final = "｜DSML｜"
_INVOKE: Final = f"<{MARK}invoke "
_INVOKE_END: Final = f"</{MARK}invoke>"
_PARAMETER: Final = f"<{MARK}parameter "
_PARAMETER_END: Final = f"</{MARK}parameter>"
_NAME: Final = re.compile(r'name="([^"]+)">')
_ARGUMENT: Final = re.compile(r'name="([^"]+)" string="(true|false)">')


def _decode(body: str, _: Tools) -> list[Called] | None:
    calls: list[Called] = []
    place = 0
    while invoked := between(body, place, _INVOKE, _INVOKE_END):
        call = _call(invoked[0])
        if call is None:
            return None
        calls.append(call)
        place = invoked[1]
    return calls if calls and not body[place:].strip() else None


def _call(text: str) -> Called | None:
    name = _NAME.match(text)
    if name is None:
        return None
    arguments: dict[str, Any] = {}
    place = name.end()
    while parameter := between(text, place, _PARAMETER, _PARAMETER_END):
        argument = _ARGUMENT.match(parameter[0])
        if argument is None:
            return None
        value = parameter[0][argument.end() :]
        try:
            arguments[argument[1]] = value if argument[2] == "true" else json.loads(value)
        except (ValueError, RecursionError):
            return None
        place = parameter[1]
    return None if text[place:].strip() else make_call(name[1], arguments)


def _syntax(whole: str) -> CallSyntax:
    return CallSyntax(f"<{MARK}{whole}>", f"</{MARK}{whole}>", _decode, last=_INVOKE_END)


FUNCTION_CALLS = _syntax("function_calls")
TOOL_CALLS = _syntax("tool_calls")
