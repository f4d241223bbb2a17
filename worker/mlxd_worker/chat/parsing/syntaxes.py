"""How families write calls between marks: what a body means, family by family.

A decoder raises ValueError, or RecursionError, for a body that is no call.
"""

# ruff: noqa: RUF001, RUF002 - letters of the models' own

from __future__ import annotations

import json
import re
from typing import Any, Final

from mlxd_shared.domain.chats import json_object
from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, between, call_of, make_call


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.match(text)
    if match is None:
        raise ValueError("does not begin like a call")
    return match


def _check_rest(rest: str, *allowed: str) -> None:
    if rest.strip() not in ("", *allowed):
        raise ValueError("does not end with a call")


def _decode_hermes(body: str, _: Tools) -> list[Called]:
    """Hermes, Qwen 2.5 and Qwen 3: a JSON object."""
    return [call_of(json.loads(body))]


HERMES: Final = CallSyntax("<tool_call>", "</tool_call>", _decode_hermes, json=True)

_CODER_END: Final = "</function>"
_CODER_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>")
_CODER_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>")
_CODER_PARAMETER_END: Final = "</parameter>"


def _decode_coder(body: str, tools: Tools) -> list[Called]:
    """Qwen3-Coder: <function=NAME> with a <parameter=NAME> for each argument."""
    function = _match(_CODER_FUNCTION, body)
    name, place = function[1], function.end()
    arguments: dict[str, Any] = {}
    while match := _CODER_PARAMETER.match(body, place):
        end = body.index(_CODER_PARAMETER_END, match.end())
        value = body[match.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[match[1]] = tools.value(name, match[1], value)
        place = end + len(_CODER_PARAMETER_END)
    _check_rest(body[place:], _CODER_END)
    return [make_call(name, arguments)]


QWEN3_CODER: Final = CallSyntax("<tool_call>", "</tool_call>", _decode_coder, last=_CODER_END)

_GLM_NAME: Final = re.compile(r"\s*([^\s<]+)\s*")


def _decode_glm(body: str, tools: Tools) -> list[Called]:
    """GLM 4.5 and later: a name, then <arg_key> and <arg_value> in turn."""
    match = _match(_GLM_NAME, body)
    name, place = match[1], match.end()
    arguments: dict[str, Any] = {}
    while key := between(body, place, "<arg_key>", "</arg_key>"):
        value = between(body, key[1], "<arg_value>", "</arg_value>")
        if value is None:
            raise ValueError("a key without a value")
        parameter = key[0].strip()
        arguments[parameter] = tools.value(name, parameter, value[0])
        place = value[1]
    _check_rest(body[place:])
    return [make_call(name, arguments)]


GLM4: Final = CallSyntax("<tool_call>", "</tool_call>", _decode_glm, last=None)

_MISTRAL_NAMED: Final = re.compile(
    r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*\})\s*\Z", re.DOTALL
)


def _decode_mistral(body: str, _: Tools) -> list[Called]:
    """Mistral: a JSON list of calls, or a name, [ARGS] and a JSON object."""
    if body.lstrip().startswith("["):
        return [call_of(item) for item in json.loads(body)]
    match = _match(_MISTRAL_NAMED, body)
    return [make_call(match[1], json_object(match[2]))]


MISTRAL: Final = CallSyntax("[TOOL_CALLS]", None, _decode_mistral, json=True)
MISTRAL_MARKS: Final = ("[ARGS]", "[CALL_ID]")

KIMI_MARKS: Final = (
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
_KIMI_CALL: Final = re.compile(
    r"\s*{0}\s*(?:functions\.)?([^\s:<]+)(?::\d+)?\s*{2}(.*?)(?:{1}|\Z)\s*".format(
        *map(re.escape, KIMI_MARKS)
    ),
    re.DOTALL,
)


def _decode_kimi(body: str, _: Tools) -> list[Called]:
    """Kimi K2: calls, each with its id (functions.NAME:INDEX) and JSON arguments."""
    calls: list[Called] = []
    place = 0
    while match := _KIMI_CALL.match(body, place):
        calls.append(make_call(match[1], json_object(match[2])))
        place = match.end()
    _check_rest(body[place:])
    return calls


KIMI: Final = CallSyntax("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _decode_kimi)

DEEPSEEK_MARKS: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
_FENCE: Final = "```"


def _decode_deepseek(body: str, _: Tools) -> list[Called]:
    """DeepSeek V3 and R1: calls with marks of their own, the arguments as JSON, fenced or bare."""
    opened, closed, separator = DEEPSEEK_MARKS
    before, *parts = body.split(opened)
    _check_rest(before)
    calls = []
    for part in parts:
        inner, _closed, after = part.partition(closed)
        first, separated, second = inner.partition(separator)
        _check_rest(after)
        if not separated:
            raise ValueError("a call without its kind")
        name, fence, arguments = second.strip().partition(f"{_FENCE}json")
        if not fence or not arguments.endswith(_FENCE):
            name, arguments = first, second
        calls.append(make_call(name.strip(), json_object(arguments.removesuffix(_FENCE))))
    return calls


DEEPSEEK: Final = CallSyntax("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _decode_deepseek)

DSML_MARK: Final = "｜DSML｜"
_INVOKE_END: Final = f"</{DSML_MARK}invoke>"
_INVOKE_NAME: Final = re.compile(r'name="([^"]+)">')
_ARGUMENT: Final = re.compile(r'name="([^"]+)" string="(true|false)">')


def _decode_dsml(body: str, _: Tools) -> list[Called]:
    """DeepSeek V3.2 and later: calls as elements, each argument in one of its own.

        <｜DSML｜invoke name="NAME">
        <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
        </｜DSML｜invoke>

    A value is plain text if it is a string, otherwise JSON.
    """
    calls: list[Called] = []
    place = 0
    while invoked := between(body, place, f"<{DSML_MARK}invoke ", _INVOKE_END):
        calls.append(_invoke(invoked[0]))
        place = invoked[1]
    _check_rest(body[place:])
    return calls


def _invoke(text: str) -> Called:
    name = _match(_INVOKE_NAME, text)
    arguments: dict[str, Any] = {}
    place = name.end()
    opened, closed = f"<{DSML_MARK}parameter ", f"</{DSML_MARK}parameter>"
    while parameter := between(text, place, opened, closed):
        argument = _match(_ARGUMENT, parameter[0])
        value = parameter[0][argument.end() :]
        arguments[argument[1]] = value if argument[2] == "true" else json.loads(value)
        place = parameter[1]
    _check_rest(text[place:])
    return make_call(name[1], arguments)


DSML_V3, DSML_V4 = (
    CallSyntax(f"<{DSML_MARK}{whole}>", f"</{DSML_MARK}{whole}>", _decode_dsml, last=_INVOKE_END)
    for whole in ("function_calls", "tool_calls")
)
"""V3.2's and V4's: they call the whole by other names."""
