"""Anthropic's answers, made of mlxd's events: blocks of a stream, or the whole at once. Pure.

Invariants:
- Blocks are numbered from 0 in the order of an answer's parts; one is open at a time.
- A stream tells its input tokens at its end: before, nobody knows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxd import AnswerPart, Completion, Delta, Finished, FinishReason, ToolCall, Usage
from mlxd_gateway.anthropic.errors import error_body
from mlxd_gateway.common.failures import Failure
from mlxd_gateway.common.generation import Source
from mlxd_gateway.common.responses import write_event
from mlxd_gateway.common.texts import raw_json

Object = dict[str, Any]
_REASONS = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTEXT: "model_context_window_exceeded",
    FinishReason.STOP_STRING: "stop_sequence",
}
PING = write_event({"type": "ping"}, "ping")


async def ping(_: Source) -> bytes:
    """Return the API's own sign of life."""
    return PING


def stop_of(finished: Finished, *, calls: bool) -> Object:
    """Return why an answer ended."""
    reason = _REASONS.get(finished.reason, "tool_use" if calls else "end_turn")
    matched = finished.matched if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": matched}


def write_usage(usage: Usage) -> Object:
    """Return what a request cost; tokens that were kept are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _message(message_id: str, model: str, content: list[Object], **more: object) -> Object:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **more,
    }


def _call_block(call: ToolCall, *, is_open: bool) -> Object:
    arguments: object = {} if is_open else raw_json(call.arguments_json)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def whole_message(message_id: str, model: str, done: Completion) -> Object:
    """Return a message at once: thinking, text and calls, as far as there are any."""
    answer = done.message
    content: list[Object] = []
    if answer is not None and answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if done.text:
        content.append({"type": "text", "text": done.text})
    calls = () if answer is None else answer.tool_calls
    content += [_call_block(call, is_open=False) for call in calls]
    end = stop_of(done.finished, calls=bool(calls))
    return _message(message_id, model, content, **end, usage=write_usage(done.finished.usage))


class MessageWriter:
    """Events of a message."""

    def __init__(self, message_id: str, model: str) -> None:
        """Write a stream; `model` is the name that was asked for."""
        self._id = message_id
        self._model = model
        self._open: int | None = None
        """The part whose block is open."""
        self._blocks = 0
        self._calls = False

    def begin(self) -> Iterator[bytes]:
        """Return the event that begins a message."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        head = _message(
            self._id, self._model, [], stop_reason=None, stop_sequence=None, usage=usage
        )
        yield write_event({"type": "message_start", "message": head}, "message_start")
        yield PING

    def write(self, event: Delta | Finished) -> Iterator[bytes]:
        """Return the events of one of mlxd's."""
        if isinstance(event, Delta):
            for part in event.parts:
                yield from self._write_part(part)
            return
        yield from self._close()
        end = {
            "type": "message_delta",
            "delta": stop_of(event, calls=self._calls),
            "usage": write_usage(event.usage),
        }
        yield write_event(end, "message_delta")
        yield write_event({"type": "message_stop"}, "message_stop")

    def fail(self, failure: Failure) -> Iterator[bytes]:
        """Return the event that tells of a failure."""
        yield write_event(error_body(failure), "error")

    def _write_part(self, part: AnswerPart) -> Iterator[bytes]:
        if self._open != part.index:
            yield from self._close()
            yield from self._start(part)
        if part.tool_call is not None:
            delta = {"type": "input_json_delta", "partial_json": part.tool_call.arguments_json}
        elif part.reasoning:
            delta = {"type": "thinking_delta", "thinking": part.reasoning}
        else:
            delta = {"type": "text_delta", "text": part.text}
        yield self._event("content_block_delta", delta=delta)

    def _start(self, part: AnswerPart) -> Iterator[bytes]:
        self._open = part.index
        if part.tool_call is not None:
            self._calls = True
            block = _call_block(part.tool_call, is_open=True)
        elif part.reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        yield self._event("content_block_start", content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield self._event("content_block_stop")
            self._open = None
            self._blocks += 1

    def _event(self, kind: str, **more: object) -> bytes:
        return write_event({"type": kind, "index": self._blocks, **more}, kind)
