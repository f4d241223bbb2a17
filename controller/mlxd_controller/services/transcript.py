"""Prompts and outputs in the log, for an operator who asked for them (`--log-content`).

Off by default, and then no frame is parsed for it. What one request logs is bounded, and so is what
is read and written for that: a large conversation is not rendered to be cut, nor on the event loop.
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
"""The least that an item of a list takes in JSON beside its texts: {} or quotation marks."""

_log = get_logger("content")


class Transcript:
    """What was asked and answered in one Generate."""

    def __init__(self, *, wanted: bool) -> None:
        """Collect only if `wanted`."""
        self._wanted = wanted
        self._parts: dict[int, list[str]] = {}
        self._room_chars = config.LOGGED_CHARS_MAX

    def note_frame(self, frame: bytes) -> None:
        """Note a message of the stream."""
        if self._wanted and self._room_chars > 0:
            message = inference_pb2.GenerateResponse.FromString(frame)
            text = _text_of_message(message)[: self._room_chars]
            self._room_chars -= len(text)
            self._parts.setdefault(message.choice, []).append(text)

    @asynccontextmanager
    async def of(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[None]:
        """Log the prompt and what was answered to it when the request ends, however it ends.

        Several choices are logged one behind the other, with line ends between them.
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
    """Return a prompt as it was given, a conversation as JSON; at most `limit` of it."""
    if request.HasField("chat"):
        chat = inference_pb2.ChatPrompt()
        _copy(request.chat, chat, limit)
        return MessageToJson(chat, indent=None)[:limit]
    return request.text[:limit] or list(request.tokens.ids[:limit])


def _copy(source: Message, target: Message, room: int) -> int:
    """Copy what can show in the first `room` characters of JSON; return how many are left.

    Fields come in the order in which JSON has them, and JSON is no shorter than the texts in it: so
    whatever is left out or cut here lies behind those characters.
    """
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
    """Return all that a message tells of the output, reasoning and calls too."""
    if not message.parts:
        return message.text
    return "".join(
        part.text or part.reasoning or f"{part.tool_call.name}({part.tool_call.arguments_json})"
        for part in message.parts
    )
