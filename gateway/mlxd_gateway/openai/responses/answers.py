"""A response, made of mlxd's events: the events of its stream, and the whole. Pure.

Invariants:
- Events are numbered from 0. One item is open at a time, and items are numbered in their order.
- A response that ended whole is given to `keep` before its last event is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from mlxd import AnswerPart, Delta, Finished, FinishReason, Usage
from mlxd_gateway.common.failures import Failure, FailureKind
from mlxd_gateway.common.responses import write_event
from mlxd_gateway.openai.answers import token_logprobs
from mlxd_gateway.openai.responses.heads import Head
from mlxd_gateway.openai.responses.outputs import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Event,
    Object,
    OpenItem,
    OpenMessage,
    open_item,
)

FAILED = "failed"
_CUT = (FinishReason.LENGTH, FinishReason.CONTEXT)
_CODES = {
    FailureKind.INVALID: "invalid_prompt",
    FailureKind.TOO_LARGE: "invalid_prompt",
    FailureKind.BUSY: "rate_limit_exceeded",
}
Keep = Callable[[Object], None]


class ResponseWriter:
    """Writes one response."""

    def __init__(self, head: Head, keep: Keep) -> None:
        """Begin at nothing."""
        self._head = head
        self._keep = keep
        self._sequence = 0
        self._output: list[Object] = []
        self._open: OpenItem | None = None
        self._part = -1
        """The part of the answer that is open."""
        self._logprobs: list[Object] = []
        """Of tokens whose text has not come yet."""
        self._reasoning_tokens = 0
        self._thinks = False
        """Whether what came last is reasoning."""

    def begin(self) -> Iterator[bytes]:
        """Return the events that begin a stream."""
        response = self._response(IN_PROGRESS)
        yield self._write_event("created", {"response": response})
        yield self._write_event(IN_PROGRESS, {"response": response})

    def write(self, event: Delta | Finished) -> Iterator[bytes]:
        """Return the events of one of mlxd's."""
        for name, fields in self._events_of(event):
            yield self._write_event(name, fields)

    def fail(self, failure: Failure) -> Iterator[bytes]:
        """Return the event that tells of a failure; what has come is part of it."""
        output = list(self._output)
        if self._open is not None:
            output.append(self._open.write(INCOMPLETE))
        code = _CODES.get(failure.kind, "server_error")
        error = {"code": code, "message": failure.message, "param": failure.field or None}
        response = self._response(FAILED, output=output, error=error)
        yield self._write_event(FAILED, {"response": response})

    def whole(self, events: Iterable[Delta | Finished]) -> Object:
        """Return the response that all events of a generation come to."""
        ((_, last),) = deque(chain.from_iterable(map(self._events_of, events)), maxlen=1)
        response: Object = last["response"]
        return response

    def _events_of(self, event: Delta | Finished) -> Iterator[Event]:
        if isinstance(event, Finished):
            yield from self._finish(event)
            return
        self._reasoning_tokens += self._count_reasoning(event)
        self._logprobs += token_logprobs(event.logprobs)
        for part in event.parts:
            yield from self._add(part)
        if self._thinks:
            self._logprobs = []

    def _add(self, part: AnswerPart) -> Iterator[Event]:
        if self._part != part.index:
            yield from self._close(COMPLETED)
            yield from self._start(part)
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        yield from self._of_item(self._open.add(part, logprobs))
        if part.tool_call is not None:
            yield from self._close(COMPLETED)

    def _start(self, part: AnswerPart) -> Iterator[Event]:
        index = len(self._output)
        unique = f"{self._head.unique}_{index}"
        self._part = part.index
        self._open = open_item(part, unique, as_summary=self._head.as_summary)
        item = self._open.write(IN_PROGRESS)
        yield "output_item.added", {"output_index": index, "item": item}
        yield from self._of_item(self._open.start())

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._of_item(self._open.end())
        item = self._open.write(status)
        yield "output_item.done", {"output_index": len(self._output), "item": item}
        self._output.append(item)
        self._open = None

    def _finish(self, finished: Finished) -> Iterator[Event]:
        if self._logprobs and isinstance(self._open, OpenMessage):
            yield from self._add(AnswerPart(self._part))
        is_cut = finished.reason in _CUT
        status = INCOMPLETE if is_cut else COMPLETED
        yield from self._close(status)
        response = self._response(
            status,
            output=self._output,
            usage=write_usage(finished.usage, self._reasoning_tokens),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )
        self._keep(response)
        yield status, {"response": response}

    def _of_item(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield events with the id and the index of the item that is open."""
        assert self._open is not None
        where = {"item_id": self._open.id, "output_index": len(self._output)}
        for name, fields in events:
            yield name, {**where, **fields}

    def _count_reasoning(self, delta: Delta) -> int:
        """Return how many of a delta's tokens are reasoning.

        Where it ends within a delta, as only a slow reader's are, tokens are shared by characters.
        """
        thought = sum(len(part.reasoning) for part in delta.parts)
        rest = sum(
            len(part.text) + (0 if part.tool_call is None else len(part.tool_call.arguments_json))
            for part in delta.parts
        )
        if delta.parts:
            self._thinks = bool(delta.parts[-1].reasoning)
        if thought + rest == 0:
            return len(delta.token_ids) if self._thinks else 0
        return round(len(delta.token_ids) * thought / (thought + rest))

    def _response(self, status: str, **more: object) -> Object:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._head.fields,
            **more,
        }

    def _write_event(self, name: str, fields: Object) -> bytes:
        kind = f"response.{name}"
        event = write_event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return event


def write_usage(usage: Usage, reasoning_tokens: int) -> Object:
    """Return what a response cost."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
