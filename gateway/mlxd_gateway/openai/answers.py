"""OpenAI's answers, made of mlxd's events: chunks of a stream, or the whole at once. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mlxd import (
    AnswerPart,
    Completion,
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptEcho,
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


def write_usage(usages: Sequence[Usage]) -> Object:
    """Return what all choices of a request cost; the first one's has the prompt's tokens."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    drafted = sum(usage.drafted_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
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
    content = token_logprobs(positions)
    return {"content": content, "refusal": None} if content else None


def token_logprobs(positions: Iterable[PositionLogprobs]) -> list[Object]:
    """Return the log-probabilities of tokens, each with the best ones at its place."""
    return [
        {**_token(each.chosen), "top_logprobs": [_token(token) for token in each.top]}
        for each in positions
    ]


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
    offsets = list(accumulate(map(len, tokens[:-1]), initial=offset))
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


def echo_logprobs(prompt: PromptEcho) -> Object | None:
    """Return the log-probabilities of an echoed prompt's tokens; the first one has none."""
    if not prompt.logprobs:
        return None
    rest = [each.chosen.text_bytes.decode(errors="replace") for each in prompt.logprobs]
    first = prompt.text[: max(len(prompt.text) - sum(map(len, rest)), 0)]
    of_rest = completion_logprobs(prompt.logprobs, len(first))
    assert of_rest is not None, "there are some"
    return {
        "tokens": [first, *of_rest["tokens"]],
        "token_logprobs": [None, *of_rest["token_logprobs"]],
        "top_logprobs": [None, *of_rest["top_logprobs"]],
        "text_offset": [0, *of_rest["text_offset"]],
    }


def _join_logprobs(first: Object | None, second: Object | None) -> Object | None:
    if first is None or second is None:
        return first or second
    return {name: [*values, *second[name]] for name, values in first.items()}


class ChatWriter:
    """Chunks of a chat's answer."""

    def __init__(self, head: Head, *, usage: bool, choices: int = 1) -> None:
        """Write a stream, at whose end the usage stands if `usage` says so."""
        self._ends = _Ends(head, "chat.completion.chunk", usage=usage, choices=choices)
        self._calls = [0] * choices

    def begin(self) -> Iterator[bytes]:
        """Return the chunks that name the role."""
        for choice in range(len(self._calls)):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def write(self, event: Delta | Finished) -> Iterator[bytes]:
        """Return the chunks of an event."""
        choice = event.choice
        if isinstance(event, Finished):
            reason = finish_reason(event.reason, calls=bool(self._calls[choice]))
            yield self._chunk(choice, {}, reason=reason)
            yield from self._ends.note(event)
            return
        logprobs = chat_logprobs(event.logprobs)
        for part in event.parts:
            yield self._chunk(choice, self._delta(choice, part), logprobs=logprobs)
            logprobs = None
        if logprobs is not None:
            yield self._chunk(choice, {"content": ""}, logprobs=logprobs)

    def fail(self, failure: Failure) -> Iterator[bytes]:
        """Return the event that tells of a failure."""
        yield write_event(error_body(failure))

    def _delta(self, choice: int, part: AnswerPart) -> Object:
        if part.tool_call is not None:
            call = {"index": self._calls[choice], **write_call(part.tool_call)}
            self._calls[choice] += 1
            return {"tool_calls": [call]}
        return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.text}

    def _chunk(
        self,
        index: int,
        delta: Object,
        *,
        reason: str | None = None,
        logprobs: Object | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return self._ends.wrap(choice)


class CompletionWriter:
    """Chunks of a completion."""

    def __init__(self, head: Head, *, usage: bool, choices: int = 1) -> None:
        """Write a stream, at whose end the usage stands if `usage` says so."""
        self._ends = _Ends(head, "text_completion", usage=usage, choices=choices)
        self._chars = [0] * choices

    def begin(self) -> Iterator[bytes]:
        """Return nothing."""
        yield from ()

    def write(self, event: Delta | Finished) -> Iterator[bytes]:
        """Return the chunks of an event."""
        choice = event.choice
        if isinstance(event, Finished):
            yield self._chunk(choice, "", reason=finish_reason(event.reason))
            yield from self._ends.note(event)
            return
        if event.prompt is not None:
            yield self._chunk(choice, event.prompt.text, logprobs=echo_logprobs(event.prompt))
            self._chars[choice] += len(event.prompt.text)
        if event.text or event.logprobs:
            logprobs = completion_logprobs(event.logprobs, self._chars[choice])
            yield self._chunk(choice, event.text, logprobs=logprobs)
            self._chars[choice] += len(event.text)

    def fail(self, failure: Failure) -> Iterator[bytes]:
        """Return the event that tells of a failure."""
        yield write_event(error_body(failure))

    def _chunk(
        self, index: int, text: str, *, reason: str | None = None, logprobs: Object | None = None
    ) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}
        return self._ends.wrap(choice)


class _Ends:
    """A stream's chunks, and what comes behind the end of its last choice."""

    def __init__(self, head: Head, kind: str, *, usage: bool, choices: int) -> None:
        self._head = head
        self._kind = kind
        self._wants_usage = usage
        self._choices = choices
        self._usages: list[Usage] = []

    def wrap(self, choice: Object) -> bytes:
        """Return the chunk of one choice."""
        more: Object = {"usage": None} if self._wants_usage else {}
        return write_event(self._head.wrap(self._kind, [choice], **more))

    def note(self, end: Finished) -> Iterator[bytes]:
        """Return what comes behind the end of a choice: nothing, before the last one's."""
        self._usages.append(end.usage)
        if len(self._usages) < self._choices:
            return
        if self._wants_usage:
            usage = write_usage(self._usages)
            yield write_event(self._head.wrap(self._kind, [], usage=usage))
        yield DONE


def whole_chat(head: Head, completions: Sequence[Completion]) -> Object:
    """Return a chat's answer at once."""
    choices = [_chat_choice(index, done) for index, done in enumerate(completions)]
    return head.wrap("chat.completion", choices, usage=_usage_of(completions))


def _chat_choice(index: int, done: Completion) -> Object:
    answer = done.message
    message: Object = {"role": "assistant", "content": done.text or None, "refusal": None}
    calls = () if answer is None else answer.tool_calls
    if calls:
        message["tool_calls"] = [write_call(call) for call in calls]
    else:
        message["content"] = done.text
    if answer is not None and answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return {
        "index": index,
        "message": message,
        "finish_reason": finish_reason(done.finished.reason, calls=bool(calls)),
        "logprobs": chat_logprobs(done.logprobs),
    }


def whole_completion(
    head: Head, completions: Sequence[Completion], made: Sequence[Completion] = ()
) -> Object:
    """Return a completion at once; `made` are all that were made, where these are the best."""
    choices = [_text_choice(index, done) for index, done in enumerate(completions)]
    return head.wrap("text_completion", choices, usage=_usage_of(made or completions))


def _text_choice(index: int, done: Completion) -> Object:
    echoed = "" if done.prompt is None else done.prompt.text
    logprobs = completion_logprobs(done.logprobs, len(echoed))
    if done.prompt is not None:
        logprobs = _join_logprobs(echo_logprobs(done.prompt), logprobs)
    return {
        "index": index,
        "text": echoed + done.text,
        "finish_reason": finish_reason(done.finished.reason),
        "logprobs": logprobs,
    }


def _usage_of(completions: Sequence[Completion]) -> Object:
    return write_usage([done.finished.usage for done in completions])
