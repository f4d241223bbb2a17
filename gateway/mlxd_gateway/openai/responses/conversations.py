"""A conversation's items as the messages of a chat. Pure.

Invariants:
- What an assistant thought, said and called between others' items is one message; a second text
  without a call between begins another one.
- Each field of a message has the request's name of it, the finer ones first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mlxd import ChatMessage, ContentPart, ToolCall
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.images import image_of_url
from mlxd_gateway.openai.requests import Refusal
from mlxd_gateway.openai.responses import items as i

Placed = tuple[str, i.Item]
"""The request's field that an item comes from, and the item."""


@dataclass(slots=True)
class _Turn:
    """An assistant's message in the making."""

    place: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_places: list[str] = field(default_factory=list)

    def takes(self, item: i.Item) -> bool:
        """Return whether an item is part of it."""
        match item:
            case i.Reasoning():
                return not self.texts and not self.calls
            case i.Message():
                return not self.texts or bool(self.calls)
        return True

    def add(self, item: i.Message | i.Reasoning | i.FunctionCall, place: str) -> None:
        """Take an item in."""
        match item:
            case i.Message():
                _refuse_images(item.content, f"{place}.content")
                self.texts.append(text_of(item.content))
            case i.Reasoning():
                parts = item.content or item.summary or ()
                self.thoughts.append("\n".join(part.text for part in parts))
            case i.FunctionCall():
                self.calls.append(ToolCall(item.name, item.arguments or "{}", item.call_id))
                self.call_places.append(place)

    def message(self) -> ChatMessage:
        """Return it whole."""
        return ChatMessage(
            "assistant",
            "".join(self.texts),
            reasoning="\n".join(self.thoughts),
            tool_calls=tuple(self.calls),
        )

    def names(self, message: str) -> Iterator[tuple[str, str]]:
        """Yield the wire's and the request's names of the fields of what is `message` there."""
        for index, place in enumerate(self.call_places):
            call = f"{message}.tool_calls[{index}]"
            yield f"{call}.id", f"{place}.call_id"
            yield call, place
        yield message, self.place


class Conversation:
    """Messages to which items are added in their order."""

    def __init__(self) -> None:
        """Begin without a message."""
        self._messages: list[ChatMessage] = []
        self._names: dict[str, str] = {}
        self._turn: _Turn | None = None

    def say(self, role: str, text: str, place: str) -> None:
        """Add a message whose whole content is the request's field `place`."""
        self._end_turn()
        self._names[f"{self._next}.content"] = place
        self._add(ChatMessage(role, text), place)

    def extend(self, items: Iterable[Placed]) -> None:
        """Add items."""
        for place, item in items:
            match item:
                case i.Reasoning() | i.FunctionCall() | i.Message(role="assistant"):
                    if self._turn is None or not self._turn.takes(item):
                        self._end_turn()
                        self._turn = _Turn(place)
                    self._turn.add(item, place)
                case i.Message():
                    self._end_turn()
                    text, parts = _content(item.content, f"{place}.content")
                    self._add(ChatMessage(item.role, text, parts=parts), place)
                case i.FunctionCallOutput():
                    self._end_turn()
                    self._names[f"{self._next}.content"] = f"{place}.output"
                    self._names[f"{self._next}.tool_call_id"] = f"{place}.call_id"
                    self._add(_result(item, f"{place}.output"), place)

    def end(self) -> tuple[tuple[ChatMessage, ...], dict[str, str]]:
        """Return the messages, and the request's names of the wire's fields of them."""
        self._end_turn()
        return tuple(self._messages), self._names

    @property
    def _next(self) -> str:
        """The wire's name of the next message."""
        return f"chat.messages[{len(self._messages)}]"

    def _add(self, message: ChatMessage, place: str) -> None:
        self._names[self._next] = place
        self._messages.append(message)

    def _end_turn(self) -> None:
        if self._turn is None:
            return
        turn, self._turn = self._turn, None
        self._names.update(turn.names(self._next))
        self._messages.append(turn.message())


def _result(item: i.FunctionCallOutput, place: str) -> ChatMessage:
    text, parts = _content(item.output, place)
    call_id, name = item.call_id, item.name or ""
    return ChatMessage("tool", text, tool_call_id=call_id, name=name, parts=parts)


def _content(content: str | Sequence[i.Part], place: str) -> tuple[str, tuple[ContentPart, ...]]:
    """Return a message's text and its parts: where it shows images these say all, in order.

    Raises:
        BadField: an image is none.
    """
    if isinstance(content, str) or not any(isinstance(part, i.InputImage) for part in content):
        return text_of(content), ()
    return "", tuple(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: i.Part, place: str) -> ContentPart:
    if not isinstance(part, i.InputImage):
        return ContentPart(text_of([part]))
    if part.image_url is None:
        raise BadField(f"{place}.image_url", "is needed")
    return image_of_url(part.image_url, f"{place}.image_url")


def _refuse_images(content: str | Sequence[i.Part], place: str) -> None:
    """Refuse images that an assistant is said to have shown: its texts become one message."""
    for index, part in enumerate(content):
        if isinstance(part, i.InputImage):
            raise BadField(f"{place}[{index}].type", "a message of user or tool has images")


def text_of(content: str | Iterable[i.Part]) -> str:
    """Return the text of a content; what is neither text nor image was refused before."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        match part:
            case Refusal():
                texts.append(part.refusal)
            case i.InputText() | i.OutputText():
                texts.append(part.text)
    return "\n".join(texts)
