"""The part of `convert` that checks conversations, and reads what is kept of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf import json_format

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.chats import (
    ASSISTANT,
    IMAGE_FORMATS,
    ROLES,
    Chat,
    ChatMessage,
    json_object,
)
from mlxd_shared.domain.errors import FieldViolation
from mlxd_shared.wire.convert_bounds import check_count, moment_violations
from mlxd_shared.wire.convert_format import format_from_pb
from mlxd_shared.wire.records import read

OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "strftime_now"}
)
"""What a template is given otherwise."""
IMAGE_ROLES = ("user", "tool")
"""Whose messages may have images."""


def messages_from_json(written: object) -> tuple[ChatMessage, ...]:
    """Return messages whose JSON is that of the wire's, unchecked.

    Raises:
        ValueError: they are none.
    """
    try:
        pb = json_format.ParseDict({"messages": written}, inference_pb2.ChatPrompt())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error
    return read(Chat, pb).messages


def chat_violations(pb: inference_pb2.ChatPrompt) -> list[FieldViolation]:
    """Return what is out of bounds, or makes no sense whatever the model.

    What is too large is not looked into, and of a list the first entry that is wrong is told. No
    image is parsed: only its bytes are counted.
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
    parts = sum(len(message.parts) for message in pb.messages)
    yield from check_count(
        "chat.messages", parts, config.CHAT_MESSAGES_MAX, "parts in all messages"
    )
    yield from _image_size_violations(pb)
    texts = sum(
        len(m.content) + len(m.reasoning) + len(m.name) + len(m.tool_call_id) for m in pb.messages
    )
    texts += sum(len(part.text) for message in pb.messages for part in message.parts)
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


def _image_size_violations(pb: inference_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    """Yield which bounds a request's images pass, each read once: reading one copies it."""
    sizes = {
        f"chat.messages[{index}].parts[{number}].image": len(part.image)
        for index, message in enumerate(pb.messages)
        for number, part in enumerate(message.parts)
        if part.HasField("image")
    }
    most = config.IMAGES_MAX
    yield from check_count("chat.messages", len(sizes), most, "images in all messages")
    for field, nbytes in sizes.items():
        if not nbytes:
            yield FieldViolation(field, "has no bytes")
        yield from check_count(field, nbytes, config.IMAGE_BYTES_MAX, "bytes of an image")
    total, most = sum(sizes.values()), config.IMAGES_BYTES_MAX
    yield from check_count("chat.messages", total, most, "bytes of images in all messages")


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
    yield from _choice_violations(pb)
    if pb.HasField("now"):
        yield from moment_violations(pb.now, "chat.now")
    if pb.continue_final_message:
        if pb.add_generation_prompt:
            problem = "not with continue_final_message"
            yield FieldViolation("chat.add_generation_prompt", problem)
        if pb.messages[-1].role != ASSISTANT:
            problem = "the last message must be an assistant's"
            yield FieldViolation("chat.continue_final_message", problem)


def _choice_violations(pb: inference_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    """Yield what makes no sense about who decides on calls."""
    field = "chat.tool_choice"
    is_required = pb.tool_choice == inference_pb2.TOOL_CHOICE_REQUIRED
    if pb.tool_choice not in inference_pb2.ToolChoice.values():
        yield FieldViolation(field, f"{pb.tool_choice} is not a ToolChoice")
    elif is_required and not pb.tools_json:
        yield FieldViolation(field, "a call is required, and no tool is on offer")
    elif is_required and pb.continue_final_message:
        yield FieldViolation(field, "no call can be required of a continued message")
    if pb.tool_name and not is_required:
        yield FieldViolation("chat.tool_name", "needs TOOL_CHOICE_REQUIRED")
    elif pb.tool_name and pb.tool_name not in map(_function_name, pb.tools_json):
        yield FieldViolation("chat.tool_name", f"{pb.tool_name[:80]!r} is not on offer")


def _function_name(text: str) -> str:
    """Return the name of an offered function; empty if the text is not one."""
    try:
        tool = json_object(text)
    except ValueError:  # which is told of the tool itself
        return ""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def required_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    """Return what cannot be beside a required call, which holds the output from its start on."""
    if pb.chat.tool_choice != inference_pb2.TOOL_CHOICE_REQUIRED:
        return []
    beside = (
        ("response_format", format_from_pb(pb.response_format)),
        ("ignore_eos", pb.ignore_eos),
    )
    problem = "not with chat.tool_choice TOOL_CHOICE_REQUIRED"
    return [FieldViolation(name, problem) for name, value in beside if value]


def _first_of(entries: Iterable[Iterator[FieldViolation]]) -> list[FieldViolation]:
    """Return what is wrong with the first entry of a list that is not right."""
    return next((violations for entry in entries if (violations := [*entry])), [])


def _message_violations(pb: inference_pb2.ChatMessage, place: str) -> Iterator[FieldViolation]:
    if pb.role not in ROLES:
        yield FieldViolation(f"{place}.role", f"{pb.role!r} is not one of {', '.join(ROLES)}")
    if pb.role != ASSISTANT:
        for name, value in (("reasoning", pb.reasoning), ("tool_calls", pb.tool_calls)):
            if value:
                yield FieldViolation(f"{place}.{name}", f"a message of an {ASSISTANT} has it")
    if pb.parts and pb.content:
        yield FieldViolation(f"{place}.parts", "content is given too")
    yield from _first_of(
        _part_violations(part, f"{place}.parts[{index}]", pb.role)
        for index, part in enumerate(pb.parts)
    )
    if pb.role != "tool" and pb.tool_call_id:
        yield FieldViolation(f"{place}.tool_call_id", "a message of a tool has it")
    yield from _first_of(
        _call_violations(call, f"{place}.tool_calls[{index}]")
        for index, call in enumerate(pb.tool_calls)
    )


def _part_violations(
    pb: inference_pb2.ContentPart, place: str, role: str
) -> Iterator[FieldViolation]:
    match pb.WhichOneof("kind"):
        case None:
            yield FieldViolation(place, "a part has a kind")
        case "text":
            if pb.media_type:
                yield FieldViolation(f"{place}.media_type", "an image has it")
        case "image":
            yield from _image_violations(pb, place, role)


def _image_violations(
    pb: inference_pb2.ContentPart, place: str, role: str
) -> Iterator[FieldViolation]:
    if role not in IMAGE_ROLES:
        problem = f"a message of {' or '.join(IMAGE_ROLES)} has images"
        yield FieldViolation(f"{place}.image", problem)
    known = IMAGE_FORMATS.values()
    if pb.media_type and pb.media_type not in known:
        problem = f"{pb.media_type[:80]!r} is not one of {', '.join(known)}"
        yield FieldViolation(f"{place}.media_type", problem)


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
