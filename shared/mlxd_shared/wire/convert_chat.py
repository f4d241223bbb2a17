"""The part of `convert` that checks conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.chats import ASSISTANT, ROLES, json_object
from mlxd_shared.domain.errors import FieldViolation
from mlxd_shared.wire.convert_bounds import check_count, moment_violations

OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "strftime_now"}
)
"""What a template is given otherwise."""


def chat_violations(pb: inference_pb2.ChatPrompt) -> list[FieldViolation]:
    """Return what is out of bounds, or makes no sense whatever the model.

    What is too large is not looked into, and of a list the first entry that is wrong is told.
    """
    first = next(_size_violations(pb), None)
    return [*_content_violations(pb)] if first is None else [first]


def _size_violations(pb: inference_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    """Yield which bounds are passed, those first that need no walk: the caller stops at one."""
    if not 1 <= len(pb.messages) <= config.CHAT_MESSAGES_MAX:
        yield FieldViolation("chat.messages", f"1 to {config.CHAT_MESSAGES_MAX} messages")
    calls = sum(len(message.tool_calls) for message in pb.messages)
    yield from check_count(
        "chat.messages", calls, config.CHAT_MESSAGES_MAX, "calls in all messages"
    )
    texts = sum(
        len(m.content) + len(m.reasoning) + len(m.name) + len(m.tool_call_id) for m in pb.messages
    )
    most = config.PROMPT_CHARS_MAX
    yield from check_count("chat.messages", texts, most, "characters in all messages")
    written = len(pb.template_variables_json) + sum(map(len, pb.tools_json))
    written += sum(
        len(call.arguments_json) + len(call.name) + len(call.id)
        for message in pb.messages
        for call in message.tool_calls
    )
    most = config.CHAT_JSON_CHARS_MAX
    yield from check_count("chat", written, most, "characters of JSON in a chat")


def _content_violations(pb: inference_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    yield from _first_of(
        _message_violations(message, f"chat.messages[{index}]")
        for index, message in enumerate(pb.messages)
    )
    yield from _first_of(
        _tool_violations(f"chat.tools_json[{index}]", tool)
        for index, tool in enumerate(pb.tools_json)
    )
    if pb.template_variables_json:
        yield from _variable_violations("chat.template_variables_json", pb.template_variables_json)
    if pb.HasField("now"):
        yield from moment_violations(pb.now, "chat.now")
    if pb.continue_final_message:
        if pb.add_generation_prompt:
            problem = "not with continue_final_message"
            yield FieldViolation("chat.add_generation_prompt", problem)
        if pb.messages[-1].role != ASSISTANT:
            problem = "the last message must be an assistant's"
            yield FieldViolation("chat.continue_final_message", problem)


def _first_of(entries: Iterable[Iterator[FieldViolation]]) -> list[FieldViolation]:
    """Return what is wrong with the first entry of a list that is not right."""
    return next((violations for entry in entries if (violations := [*entry])), [])


def _message_violations(pb: inference_pb2.ChatMessage, place: str) -> Iterator[FieldViolation]:
    if pb.role not in ROLES:
        yield FieldViolation(f"{place}.role", f"{pb.role!r} is none of {', '.join(ROLES)}")
    if pb.role != ASSISTANT:
        for name, value in (("reasoning", pb.reasoning), ("tool_calls", pb.tool_calls)):
            if value:
                yield FieldViolation(f"{place}.{name}", f"a message of an {ASSISTANT} has it")
    if pb.role != "tool" and pb.tool_call_id:
        yield FieldViolation(f"{place}.tool_call_id", "a message of a tool has it")
    yield from _first_of(
        _call_violations(call, f"{place}.tool_calls[{index}]")
        for index, call in enumerate(pb.tool_calls)
    )


def _call_violations(pb: inference_pb2.ToolCall, place: str) -> Iterator[FieldViolation]:
    if not pb.name:
        yield FieldViolation(f"{place}.name", "is empty")
    yield from _object_of(f"{place}.arguments_json", pb.arguments_json or "{}")[1]


def _tool_violations(field: str, text: str) -> Iterator[FieldViolation]:
    """Yield what is wrong with a function; tools of other kinds are the template's matter."""
    tool, violations = _object_of(field, text)
    yield from violations
    if violations or ("function" not in tool and tool.get("type", "function") != "function"):
        return
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        yield FieldViolation(field, "no function that has a name")


def _variable_violations(field: str, text: str) -> Iterator[FieldViolation]:
    variables, violations = _object_of(field, text)
    yield from violations
    taken = next((name for name in sorted(OWN_VARIABLES) if name in variables), None)
    if taken is not None:
        yield FieldViolation(field, f"{taken!r} is not the client's to give")


def _object_of(field: str, text: str) -> tuple[dict[str, Any], list[FieldViolation]]:
    """Return the object that a text spells, or what is wrong with it."""
    too_long = check_count(field, len(text), config.CHAT_JSON_TEXT_CHARS_MAX, "characters")
    if too_long:
        return {}, too_long
    try:
        return json_object(text), []
    except ValueError as error:
        problem = f"no JSON object: {error}"[: config.CHAT_PROBLEM_CHARS_MAX]
        return {}, [FieldViolation(field, problem)]
