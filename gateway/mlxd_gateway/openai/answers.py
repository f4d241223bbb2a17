"""OpenAI's answers, made of mlxd's events: chunks of a stream, or the whole at once. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxd import (
    AnswerPart,
    Completion,
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    TokenLogprob,
    ToolCall,
    Usage,
)
from mlxd_gateway.common.failures import Failure
from mlxd_gateway.common.responses import write_event
from mlxd_gateway.openai.errors import error_body

Object = dict[str, Any]
DONE = b"data: [DONE]\n\n"
_LENGTH = (FinishReason.LENGTH, FinishReason.CONTEXT)


@dataclass(slots=True)
class Head:
    """What each piece of an answer repeats. `model` is the name that was asked for."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: Sequence[Object], **more: object) -> Object:
        """Return an object of the API around `choices`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def write_usage(usage: Usage) -> Object:
    """Return what a request cost."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_draft_tokens,
        },
    }


def finish_reason(reason: FinishReason, *, calls: bool = False) -> str:
    """Return why an answer ended."""
    if reason in _LENGTH:
        return "length"
    return "tool_calls" if calls else "stop"


def write_call(call: ToolCall) -> Object:
    """Return a call of a tool."""
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def chat_logprobs(positions: Iterable[PositionLogprobs]) -> Object | None:
    """Return the log-probabilities of a chat's tokens; None where nobody asked."""
    content = [
        {**_token(each.chosen), "top_logprobs": [_token(token) for token in each.top]}
        for each in positions
    ]
    return {"content": content, "refusal": None} if content else None


def _token(token: TokenLogprob) -> Object:
    text = token.text_bytes
    return {
        "token": text.decode(errors="replace"),
        "logprob": token.logprob,
        "bytes": list(text),
    }


def completion_logprobs(positions: Sequence[PositionLogprobs], offset: int) -> Object | None:
    """Return the log-probabilities of a completion's tokens; None where nobody asked.

    offset: characters of the text before the first of them.
    """
    if not positions:
        return None
    tokens = [each.chosen.text_bytes.decode(errors="replace") for each in positions]
    offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    tops = (
        {token.text_bytes.decode(errors="replace"): token.logprob for token in each.top}
        for each in positions
    )
    return {
        "tokens": tokens,
        "token_logprobs": [each.chosen.logprob for each in positions],
        "top_logprobs": list(tops),
        "text_offset": offsets,
    }


class ChatWriter:
    """Chunks of a chat's answer."""

    def __init__(self, head: Head, *, usage: bool) -> None:
        """Write a stream, at whose end the usage stands if `usage` says so."""
        self._head = head
        self._usage = usage
        self._calls = 0

    def begin(self) -> Iterator[bytes]:
        """Return the chunk that names the role."""
        yield self._chunk({"role": "assistant", "content": ""})

    def write(self, event: Delta | Finished) -> Iterator[bytes]:
        """Return the chunks of an event."""
        if isinstance(event, Finished):
            reason = finish_reason(event.reason, calls=bool(self._calls))
            yield self._chunk({}, reason=reason)
            if self._usage:
                usage = write_usage(event.usage)
                yield write_event(self._head.wrap("chat.completion.chunk", [], usage=usage))
            yield DONE
            return
        logprobs = chat_logprobs(event.logprobs)
        for part in event.parts:
            yield self._chunk(self._delta(part), logprobs=logprobs)
            logprobs = None
        if logprobs is not None:
            yield self._chunk({"content": ""}, logprobs=logprobs)

    def fail(self, failure: Failure) -> Iterator[bytes]:
        """Return the event that tells of a failure."""
        yield write_event(error_body(failure))

    def _delta(self, part: AnswerPart) -> Object:
        if part.tool_call is not None:
            call = {"index": self._calls, **write_call(part.tool_call)}
            self._calls += 1
            return {"tool_calls": [call]}
        return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.text}

    def _chunk(
        self, delta: Object, *, reason: str | None = None, logprobs: Object | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        more: Object = {"usage": None} if self._usage else {}
        return write_event(self._head.wrap("chat.completion.chunk", [choice], **more))


class CompletionWriter:
    """Chunks of a completion."""

    def __init__(self, head: Head, *, usage: bool) -> None:
        """Write a stream, at whose end the usage stands if `usage` says so."""
        self._head = head
        self._usage = usage
        self._chars = 0

    def begin(self) -> Iterator[bytes]:
        """Return nothing."""
        yield from ()

    def write(self, event: Delta | Finished) -> Iterator[bytes]:
        """Return the chunks of an event."""
        if isinstance(event, Finished):
            yield self._chunk("", reason=finish_reason(event.reason))
            if self._usage:
                usage = write_usage(event.usage)
                yield write_event(self._head.wrap("text_completion", [], usage=usage))
            yield DONE
        elif event.text or event.logprobs:
            yield self._chunk(event.text, logprobs=completion_logprobs(event.logprobs, self._chars))
            self._chars += len(event.text)

    def fail(self, failure: Failure) -> Iterator[bytes]:
        """Return the event that tells of a failure."""
        yield write_event(error_body(failure))

    def _chunk(
        self, text: str, *, reason: str | None = None, logprobs: Object | None = None
    ) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}
        more: Object = {"usage": None} if self._usage else {}
        return write_event(self._head.wrap("text_completion", [choice], **more))


def whole_chat(head: Head, done: Completion) -> Object:
    """Return a chat's answer at once."""
    answer = done.message
    message: Object = {"role": "assistant", "content": done.text or None, "refusal": None}
    calls = () if answer is None else answer.tool_calls
    if calls:
        message["tool_calls"] = [write_call(call) for call in calls]
    else:
        message["content"] = done.text
    if answer is not None and answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason(done.finished.reason, calls=bool(calls)),
        "logprobs": chat_logprobs(done.logprobs),
    }
    return head.wrap("chat.completion", [choice], usage=write_usage(done.finished.usage))


def whole_completion(head: Head, done: Completion) -> Object:
    """Return a completion at once."""
    choice = {
        "index": 0,
        "text": done.text,
        "finish_reason": finish_reason(done.finished.reason),
        "logprobs": completion_logprobs(done.logprobs, 0),
    }
    return head.wrap("text_completion", [choice], usage=write_usage(done.finished.usage))
