"""What Anthropic's requests ask of a model: pure translation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from mlxd import (
    Chat,
    ChatMessage,
    ContentPart,
    FormatKind,
    ResponseFormat,
    SamplingOptions,
    ToolCall,
    ToolChoice,
)
from mlxd_gateway.agents.rules import OF_ANTHROPIC
from mlxd_gateway.anthropic import requests as r
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import ABSENT
from mlxd_gateway.common.images import image_of_base64, image_of_url
from mlxd_gateway.common.texts import join_objects, json_of

FIELDS = MappingProxyType(
    {
        "stop": "stop_sequences",
        "response_format.json_schema": "output_config.format.schema",
        "chat.template_variables_json": "thinking",
        "chat.messages": "messages",
        "chat.tools_json": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.tool_name": "tool_choice.name",
    }
)
_CHOICES = MappingProxyType(
    {
        "auto": ToolChoice.AUTO,
        "none": ToolChoice.NONE,
        "any": ToolChoice.REQUIRED,
        "tool": ToolChoice.REQUIRED,
    }
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A message, and where it comes from."""

    message: ChatMessage
    field: str
    first: int = 0
    """Which of the field's blocks its first part is: those before it are messages of their own."""


def ask_message(request: r.MessageRequest) -> Ask:
    """Return what a request for a message asks."""
    chat, names = _chat(request)
    config = request.output_config
    schema = None if config is None or config.format is None else bytes(config.format.schema)
    return Ask(
        model=request.model,
        prompt=chat,
        sampling=SamplingOptions(
            temperature=request.temperature, top_p=request.top_p, top_k=request.top_k
        ),
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        response_format=(
            None if schema is None else ResponseFormat(FormatKind.JSON_SCHEMA, schema.decode())
        ),
        fields={**names, **FIELDS},
        places=tuple(f"chat.messages[{index}]" for index in range(len(chat.messages))),
        rules=OF_ANTHROPIC,
    )


def ask_count(request: r.CountRequest) -> Ask:
    """Return what counts a conversation's tokens: an answer of one token, which tells the prompt's.

    What is evaluated for it is kept, and not evaluated again for the message itself.
    """
    chat, names = _chat(request)
    greedy = SamplingOptions(temperature=0.0)
    return Ask(
        request.model,
        chat,
        greedy,
        max_tokens=1,
        fields={**names, **FIELDS},
        places=tuple(f"chat.messages[{index}]" for index in range(len(chat.messages))),
        rules=OF_ANTHROPIC,
    )


def _chat(request: r.MessageRequest | r.CountRequest) -> tuple[Chat, dict[str, str]]:
    """Return the conversation, and the request's names of its messages' fields."""
    placed = [
        *_system(request.system),
        *(
            one
            for index, message in enumerate(request.messages)
            for one in _messages(message, f"messages[{index}]")
        ),
    ]
    for index, tool in enumerate(request.tools or ()):
        if not tool.name:
            raise BadField(f"tools[{index}].name", "is needed")
    sent = request.tool_choice or r.ToolChoice("auto")
    if sent.type == "tool" and not sent.name:
        raise BadField("tool_choice.name", "is needed")
    if sent.type != "tool" and sent.name is not None:
        raise BadField("tool_choice.name", f'means nothing with type "{sent.type}"')
    chat = Chat(
        tuple(each.message for each in placed),
        tools_json=tuple(map(_tool, request.tools or ())),
        variables_json=_variables(request),
        tool_choice=_CHOICES[sent.type],
        tool_name=(sent.name or "") if sent.type == "tool" else "",
        parallel_tool_calls=None
        if sent.disable_parallel_tool_use is None
        else (not sent.disable_parallel_tool_use),
    )
    return chat, _names_of(placed)


def _names_of(placed: Sequence[Placed]) -> dict[str, str]:
    """Return the request's names of messages' fields, those of single parts first."""
    names: dict[str, str] = {}
    for index, each in enumerate(placed):
        if each.first:
            for part in range(len(each.message.parts)):
                block = f"{each.field}.content[{each.first + part}]"
                names[f"chat.messages[{index}].content[{part}]"] = block
        names[f"chat.messages[{index}]"] = each.field
    return names


def _system(system: str | list[r.Text] | None) -> Iterator[Placed]:
    if system:
        yield Placed(ChatMessage("system", _text(system)), "system")


def _messages(message: r.User | r.Assistant | r.System, place: str) -> Iterator[Placed]:
    """Yield the messages that one of the API's is: a tool's answers are messages of their own."""
    content = message.content
    match message:
        case r.Assistant():
            yield Placed(_assistant(message), place)
        case r.User() if isinstance(content, list):
            yield from _user_blocks(message, place)
        case _:
            role = str(message.__struct_config__.tag)
            assert isinstance(content, str) or isinstance(message, r.System)
            said = ChatMessage(role, _text(message.content))  # type: ignore[arg-type]
            yield Placed(said, place)


def _user_blocks(message: r.User, place: str) -> Iterator[Placed]:
    """Yield runs of text and images, and the answers of tools between them, in their order."""
    run: list[ContentPart] = []
    for index, block in enumerate(message.content):
        here = f"{place}.content[{index}]"
        if isinstance(block, r.ToolResult):
            if run:
                yield Placed(_say("user", run), place, index - len(run))
                run = []
            answer = _say("tool", _parts_in(block.content, here))
            yield Placed(replace(answer, tool_call_id=block.tool_use_id), here)
        elif isinstance(block, r.Text | r.Image):
            run.append(_part(block, here))
    if run or not message.content:
        yield Placed(_say("user", run), place, len(message.content) - len(run))


def _parts_in(content: str | list[r.ResultBlock] | None, place: str) -> list[ContentPart]:
    """Return a tool's answer; what is neither text nor image was refused before."""
    if content is None or isinstance(content, str):
        return [ContentPart(content or "")]
    return [
        _part(block, f"{place}.content[{index}]")
        for index, block in enumerate(content)
        if isinstance(block, r.Text | r.Image)
    ]


def _part(block: r.Text | r.Image, place: str) -> ContentPart:
    if isinstance(block, r.Text):
        return ContentPart(block.text)
    source = block.source
    if isinstance(source, r.Url):
        return image_of_url(source.url, f"{place}.source.url")
    assert isinstance(source, r.Base64), "others were refused"
    return image_of_base64(
        source.data, f"{place}.source.data", media_type=source.media_type.lower()
    )


def _say(role: str, parts: Sequence[ContentPart]) -> ChatMessage:
    """Return a message of parts; of texts alone its content is one text."""
    if any(part.image is not None for part in parts):
        return ChatMessage(role, parts=tuple(parts))
    return ChatMessage(role, "\n".join(part.text for part in parts))


def _assistant(message: r.Assistant) -> ChatMessage:
    if isinstance(message.content, str):
        return ChatMessage("assistant", message.content)
    blocks = message.content
    return ChatMessage(
        "assistant",
        _text([block for block in blocks if isinstance(block, r.Text)]),
        reasoning="".join(block.thinking for block in blocks if isinstance(block, r.Thinking)),
        tool_calls=tuple(
            ToolCall(block.name, bytes(block.input).decode(), block.id)
            for block in blocks
            if isinstance(block, r.ToolUse)
        ),
    )


def _text(content: str | Iterable[r.Text]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)


def _tool(tool: r.Tool) -> str:
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if json_of(tool.input_schema):
        function["parameters"] = tool.input_schema
    if tool.strict:
        function["strict"] = True
    return msgspec.json.encode({"type": "function", "function": function}).decode()


def _variables(request: r.MessageRequest | r.CountRequest) -> str:
    variables: dict[str, object] = {}
    if isinstance(request.thinking, r.ThinkingOn | r.ThinkingOff):
        variables["enable_thinking"] = isinstance(request.thinking, r.ThinkingOn)
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return join_objects(variables, ABSENT, "thinking")
