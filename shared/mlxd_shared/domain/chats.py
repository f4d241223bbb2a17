"""Conversations as the domain sees them: frozen, plain values. What JSON they hold is text."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from mlxd_shared.domain.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments_json` is a JSON object."""

    name: str
    arguments_json: str = "{}"
    id: str = ""


IMAGE_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
)
"""The formats of images that are read, and their media types."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message's content: a text, or an image."""

    text: str = ""
    image: bytes | None = None
    """The bytes of an image's file; None: it is a text."""
    media_type: str = ""
    """What that file is; empty: it tells itself."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; `reasoning` and `tool_calls` are an assistant's, `tool_call_id` a tool's.

    Its content is one text, or `parts`.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[ContentPart, ...] = ()

    @property
    def text(self) -> str:
        """What it says: its content, or the texts of its parts, joined by line ends."""
        if not self.parts:
            return self.content
        return "\n".join(part.text for part in self.parts if part.image is None)

    @property
    def images(self) -> tuple[ContentPart, ...]:
        """The images among its parts."""
        return tuple(part for part in self.parts if part.image is not None)


class ToolChoice(enum.Enum):
    """Who decides on calls of tools."""

    AUTO = "auto"
    """The model."""
    NONE = "none"
    """The client: no call, and the model is not shown the tools."""
    REQUIRED = "required"
    """The client: one call or more, after reasoning at most."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to answer, or to go on with."""

    messages: tuple[ChatMessage, ...]
    tools_json: tuple[str, ...] = ()
    """The tools on offer, a JSON object each."""
    variables_json: str = ""
    """Extra variables of the template, a JSON object; empty: none."""
    add_generation_prompt: bool | None = None
    """Whether the assistant's next message is begun; None: unless the last one goes on."""
    continue_final_message: bool | None = None
    parse_output: bool | None = None
    """Whether reasoning and calls are told apart from text; None: they are."""
    now_s: float | None = None
    """The time that the template is told, in seconds since the epoch."""
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str = ""
    """The tool that is called where a call is required; empty: any."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may hold several calls; None: it may."""

    @property
    def offered(self) -> tuple[str, ...]:
        """The tools that the model is shown, and whose calls are looked for."""
        return () if self.tool_choice is ToolChoice.NONE else self.tools_json

    @property
    def requires_call(self) -> bool:
        """Whether the answer is calls, after reasoning at most."""
        return self.tool_choice is ToolChoice.REQUIRED

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        return bool(self.continue_final_message)

    @property
    def begins_answer(self) -> bool:
        """Whether the assistant's next message is begun."""
        wanted = self.add_generation_prompt
        return not self.continues if wanted is None else wanted

    @property
    def parses(self) -> bool:
        """Whether the answer comes in parts."""
        return self.parse_output is not False


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: of its text, of its reasoning, or a whole call.

    Pieces of one `index` make up one part.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


def answer_of(parts: Iterable[AnswerPart]) -> ChatMessage:
    """Return the message that an answer adds to its conversation."""
    all_parts = tuple(parts)
    return ChatMessage(
        ASSISTANT,
        content="".join(part.text for part in all_parts),
        reasoning="".join(part.reasoning for part in all_parts),
        tool_calls=tuple(part.tool_call for part in all_parts if part.tool_call is not None),
    )


def half_character(text: str) -> str:
    """Return what is wrong with a text that no encoding holds; empty where nothing is.

    JSON and Python can spell half a character: a surrogate without the other one of its pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a character (a lone surrogate) at character {error.start}"
    return ""


def chat_texts(chat: Chat) -> Iterator[tuple[str, str]]:
    """Yield every text of a conversation, and before it the field that it is on the wire."""
    for index, message in enumerate(chat.messages):
        place = f"chat.messages[{index}]"
        for name in ("role", "content", "reasoning", "tool_call_id", "name"):
            yield f"{place}.{name}", getattr(message, name)
        for number, part in enumerate(message.parts):
            yield f"{place}.parts[{number}].text", part.text
            yield f"{place}.parts[{number}].media_type", part.media_type
        for number, call in enumerate(message.tool_calls):
            for name in ("id", "name", "arguments_json"):
                yield f"{place}.tool_calls[{number}].{name}", getattr(call, name)
    for index, tool in enumerate(chat.tools_json):
        yield f"chat.tools_json[{index}]", tool
    yield "chat.template_variables_json", chat.variables_json
    yield "chat.tool_name", chat.tool_name


def chat_images(chat: Chat) -> Iterator[tuple[str, ContentPart]]:
    """Yield every image of a conversation, in order, and before it the field that it is."""
    for index, message in enumerate(chat.messages):
        for number, part in enumerate(message.parts):
            if part.image is not None:
                yield f"chat.messages[{index}].parts[{number}].image", part


def refuse_half_characters(chat: Chat) -> None:
    """Refuse a conversation whose texts no message could carry, those within its JSON included.

    Raises:
        InvalidRequest: half a character in a text; names the field.
    """
    for field, text in chat_texts(chat):
        is_json = "_json" in field
        problem = half_character(text) or (_json_half(text) if is_json else "")
        if problem:
            raise InvalidRequest.of(field, problem)


def _json_half(text: str) -> str:
    """Return what is wrong with a text inside JSON; invalid JSON is checked elsewhere."""
    if _SURROGATE_ESCAPE not in text.lower():
        return ""
    try:
        return half_character(json.dumps(json.loads(text), ensure_ascii=False))
    except (ValueError, RecursionError):
        return ""


_SURROGATE_ESCAPE = "\\ud"


def json_object(text: str) -> dict[str, Any]:
    """Return the object that `text` spells.

    Raises:
        ValueError: no JSON, no object, half a character in a text, or a number that is none or
        beyond all numbers.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
        # JSON can spell half a character, and numbers that are read as infinite.
        problem = half_character(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if problem:
        raise ValueError(problem)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - of the text, not of a type
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
