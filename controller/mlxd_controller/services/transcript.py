"""Prompts and outputs in the log, for operators who enable it (`--log-content`).

Off by default; no message is parsed for it then. The size of each entry is bounded, and so is the
work: a large conversation is never rendered whole only to be cut, nor on the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.intake import run_paced

_ITEM_CHARS = 2
"""The least that a list item adds in JSON besides its texts: {} or quotation marks."""

_log = get_logger("content")


class Transcript:
    """The prompt and output of one Generate."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._parts: dict[int, list[str]] = {}
        self._room_chars = config.LOGGED_CHARS_MAX

    def note_frame(self, frame: bytes) -> None:
        """Collect a message's output."""
        if self._wanted and self._room_chars > 0:
            message = inference_pb2.GenerateResponse.FromString(frame)
            text = _text_of_message(message)[: self._room_chars]
            self._room_chars -= len(text)
            self._parts.setdefault(message.choice, []).append(text)

    @asynccontextmanager
    async def of(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[None]:
        """Log the prompt and the output when the request ends, however it ends.

        Several choices are logged one after another, separated by line ends.
        """
        if not self._wanted:
            yield
            return
        prompt = await run_paced(prompt_of, request, config.LOGGED_CHARS_MAX)
        try:
            yield
        finally:
            outputs = ("".join(parts) for _, parts in sorted(self._parts.items()))
            _log.info("content", prompt=prompt, output="\n".join(outputs))


def prompt_of(request: inference_pb2.GenerateRequest, limit: int) -> str | list[int]:
    """Return at most `limit` characters or ids of a prompt as given, a conversation as JSON."""
    if request.HasField("chat"):
        chat = inference_pb2.ChatPrompt()
        _copy(request.chat, chat, limit)
        return MessageToJson(chat, indent=None)[:limit]
    return request.text[:limit] or list(request.tokens.ids[:limit])


def _copy(source: Message, target: Message, room: int) -> int:
    """Copy what can appear in the first `room` characters of JSON; return the room left.

    Fields come in JSON's order, and JSON is no shorter than the texts in it: whatever is left out
    or cut here lies beyond those characters. Of an image no byte is copied: what is told is its
    type, and that it is one.
    """
    if isinstance(source, inference_pb2.ContentPart) and source.HasField("image"):
        image = inference_pb2.ContentPart(image=b"", media_type=source.media_type[:room])
        target.CopyFrom(image)
        return room - len(image.media_type) - 1
    for field, value in source.ListFields():
        if room <= 0:
            break
        if field.is_repeated:
            items = getattr(target, field.name)
            for item in value:
                if room <= 0:
                    break
                if isinstance(item, str):
                    items.append(item[:room])
                    room -= len(item)
                else:
                    room = _copy(item, items.add(), room)
                room -= _ITEM_CHARS
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            kept = value[:room] if isinstance(value, str) else value
            setattr(target, field.name, kept)
            room -= len(kept) if isinstance(kept, str) else 1
    return room


def _text_of_message(message: inference_pb2.GenerateResponse) -> str:
    """Return all output in a message, including reasoning and calls."""
    if not message.parts:
        return message.text
    return "".join(
        part.text or part.reasoning or f"{part.tool_call.name}({part.tool_call.arguments_json})"
        for part in message.parts
    )
