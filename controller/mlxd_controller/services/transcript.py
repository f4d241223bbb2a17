"""Prompts and outputs in the log, for an operator who asked for them (`--log-content`).

Off by default, and then no frame is parsed for it. What one request logs is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.json_format import MessageToJson

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.logs import get_logger

_log = get_logger("content")


class Transcript:
    """What was asked and answered in one Generate."""

    def __init__(self, *, wanted: bool) -> None:
        """Collect only if `wanted`."""
        self._wanted = wanted
        self._parts: list[str] = []
        self._room_chars = config.LOGGED_CHARS_MAX

    def saw_frame(self, frame: bytes) -> None:
        """Note a message of the stream."""
        if self._wanted and self._room_chars > 0:
            text = _said(inference_pb2.GenerateResponse.FromString(frame))[: self._room_chars]
            self._room_chars -= len(text)
            self._parts.append(text)

    @contextmanager
    def of(self, request: inference_pb2.GenerateRequest) -> Iterator[None]:
        """Log the prompt and what was answered to it when the request ends, however it ends."""
        try:
            yield
        finally:
            if self._wanted:
                prompt = _asked(request, config.LOGGED_CHARS_MAX)
                _log.info("content", prompt=prompt, output="".join(self._parts))


def _asked(request: inference_pb2.GenerateRequest, limit: int) -> str | list[int]:
    """Return a prompt as it was given, a conversation as JSON; at most `limit` of it."""
    if request.HasField("chat"):
        return MessageToJson(request.chat, indent=None)[:limit]
    return request.text[:limit] or list(request.tokens.ids[:limit])


def _said(message: inference_pb2.GenerateResponse) -> str:
    """Return all that a message tells of the output, reasoning and calls too."""
    if not message.parts:
        return message.text
    return "".join(
        part.text or part.reasoning or f"{part.tool_call.name}({part.tool_call.arguments_json})"
        for part in message.parts
    )
