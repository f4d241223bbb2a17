"""The part of `convert` that reads conversations, and writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.chats import (
    ASSISTANT,
    ROLES,
    AnswerPart,
    Chat,
    ChatMessage,
    ToolCall,
    json_object,
)
from mlxd_shared.domain.errors import FieldViolation
from mlxd_shared.wire.convert_bounds import moment_violations, timestamp_to_pb

OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "strftime_now"}
)
"""What a template is given otherwise."""


def chat_from_pb(pb: inference_pb2.ChatPrompt) -> Chat:
    """Return the conversation, unchecked."""
    return Chat(
        messages=tuple(map(_message_from_pb, pb.messages)),
        tools_json=tuple(pb.tools_json),
        variables_json=pb.template_variables_json,
        add_generation_prompt=(
            pb.add_generation_prompt if pb.HasField("add_generation_prompt") else None
        ),
        continue_final_message=(
            pb.continue_final_message if pb.HasField("continue_final_message") else None
        ),
        parse_output=pb.parse_output if pb.HasField("parse_output") else None,
        now_s=pb.now.ToMicroseconds() / 1e6 if pb.HasField("now") else None,
    )


def chat_to_pb(chat: Chat) -> inference_pb2.ChatPrompt:
    """Return the conversation for the wire; what is None stays absent."""
    return inference_pb2.ChatPrompt(
        messages=map(_message_to_pb, chat.messages),
        tools_json=chat.tools_json,
        template_variables_json=chat.variables_json,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        parse_output=chat.parse_output,
        now=None if chat.now_s is None else timestamp_to_pb(chat.now_s),
    )


def _message_from_pb(pb: inference_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=pb.role,
        content=pb.content,
        reasoning=pb.reasoning,
        tool_calls=tuple(call_from_pb(call) for call in pb.tool_calls),
        tool_call_id=pb.tool_call_id,
        name=pb.name,
    )


def _message_to_pb(message: ChatMessage) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=map(call_to_pb, message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def call_from_pb(pb: inference_pb2.ToolCall) -> ToolCall:
    """Return a call, unchecked."""
    return ToolCall(pb.name, pb.arguments_json, pb.id)


def call_to_pb(call: ToolCall) -> inference_pb2.ToolCall:
    """Return a call for the wire."""
    return inference_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)


def part_from_pb(pb: inference_pb2.OutputPart) -> AnswerPart:
    """Return a piece of an answer."""
    call = call_from_pb(pb.tool_call) if pb.HasField("tool_call") else None
    return AnswerPart(pb.index, pb.text, pb.reasoning, call)


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
    if len(pb.tools_json) > config.CHAT_TOOLS_MAX:
        yield FieldViolation("chat.tools_json", f"at most {config.CHAT_TOOLS_MAX} tools")
    calls = sum(len(message.tool_calls) for message in pb.messages)
    if calls > config.CHAT_MESSAGES_MAX:
        limit = f"at most {config.CHAT_MESSAGES_MAX} calls in all messages"
        yield FieldViolation("chat.messages", limit)
    texts = sum(
        len(m.content) + len(m.reasoning) + len(m.name) + len(m.tool_call_id) for m in pb.messages
    )
    if texts > config.PROMPT_CHARS_MAX:
        limit = f"at most {config.PROMPT_CHARS_MAX} characters in all messages"
        yield FieldViolation("chat.messages", limit)
    written = len(pb.template_variables_json) + sum(map(len, pb.tools_json))
    written += sum(
        len(call.arguments_json) + len(call.name) + len(call.id)
        for message in pb.messages
        for call in message.tool_calls
    )
    if written > config.CHAT_JSON_CHARS_MAX:
        limit = f"at most {config.CHAT_JSON_CHARS_MAX} characters of JSON in a chat"
        yield FieldViolation("chat", limit)


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
    if len(text) > config.CHAT_JSON_TEXT_CHARS_MAX:
        limit = f"at most {config.CHAT_JSON_TEXT_CHARS_MAX} characters"
        return {}, [FieldViolation(field, limit)]
    try:
        return json_object(text), []
    except ValueError as error:
        problem = f"no JSON object: {error}"[: config.CHAT_PROBLEM_CHARS_MAX]
        return {}, [FieldViolation(field, problem)]
