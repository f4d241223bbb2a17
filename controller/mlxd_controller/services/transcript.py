"""Prompts and outputs in the log, for an operator who asked for them (`--log-content`).

Off by default, and then no frame is parsed for it. What one request logs is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
            text = inference_pb2.GenerateResponse.FromString(frame).text[: self._room_chars]
            self._room_chars -= len(text)
            self._parts.append(text)

    @contextmanager
    def of(self, request: inference_pb2.GenerateRequest) -> Iterator[None]:
        """Log the prompt and what was answered to it when the request ends, however it ends."""
        try:
            yield
        finally:
            if self._wanted:
                limit = config.LOGGED_CHARS_MAX
                prompt = request.text[:limit] or list(request.tokens.ids[:limit])
                _log.info("content", prompt=prompt, output="".join(self._parts))
