"""The items of a response's output while they come: what each adds to the stream. Pure.

Invariants:
- An item's events come in this order: added, its part's added, deltas, done, its part's done, done.
- An event holds neither its item's id and index nor its own number, which are the stream's to add.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mlxd import AnswerPart, ToolCall

Object = dict[str, Any]
Event = tuple[str, Object]
"""A type of event, without `response.`, and its fields."""
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
_FIRST: Object = {"content_index": 0}
_FIRST_SUMMARY: Object = {"summary_index": 0}


class OpenItem(Protocol):
    """An item that has begun."""

    id: str

    def write(self, status: str) -> Object:
        """Return it as it is now."""

    def start(self) -> Iterator[Event]:
        """Return what follows its event `output_item.added`."""

    def add(self, part: AnswerPart, logprobs: Sequence[Object], /) -> Iterator[Event]:
        """Return what a piece of it adds."""

    def end(self) -> Iterator[Event]:
        """Return what comes before its event `output_item.done`."""


class OpenMessage:
    """Text that a model says."""

    def __init__(self, unique: str) -> None:
        """Begin without text. `unique` is part of its id."""
        self.id = f"msg_{unique}"
        self._texts: list[str] = []
        self._logprobs: list[Object] = []

    def write(self, status: str) -> Object:
        """Return it as it is now: without a part while it has only been added."""
        content = [] if status == IN_PROGRESS else [self._part()]
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def start(self) -> Iterator[Event]:
        """Return the event that adds its part."""
        yield "content_part.added", {**_FIRST, "part": self._part()}

    def add(self, part: AnswerPart, logprobs: Sequence[Object], /) -> Iterator[Event]:
        """Return a delta of text; with the log-probabilities of its tokens."""
        self._texts.append(part.text)
        self._logprobs += logprobs
        yield "output_text.delta", {**_FIRST, "delta": part.text, "logprobs": list(logprobs)}

    def end(self) -> Iterator[Event]:
        """Return its whole text."""
        part = self._part()
        done = {**_FIRST, "text": part["text"], "logprobs": part["logprobs"]}
        yield "output_text.done", done
        yield "content_part.done", {**_FIRST, "part": part}

    def _part(self) -> Object:
        text, logprobs = "".join(self._texts), list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class OpenReasoning:
    """What a model thinks, as the content of its item, or as its summary."""

    def __init__(self, unique: str, *, as_summary: bool) -> None:
        """Begin without text. `unique` is part of its id."""
        self.id = f"rs_{unique}"
        self._as_summary = as_summary
        self._texts: list[str] = []

    def write(self, status: str) -> Object:
        """Return it as it is now: without a part while it has only been added."""
        parts = [] if status == IN_PROGRESS else [self._part()]
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": parts if self._as_summary else [],
            "content": [] if self._as_summary else parts,
        }

    def start(self) -> Iterator[Event]:
        """Return the event that adds its part."""
        yield self._event("part.added", part=self._part())

    def add(self, part: AnswerPart, _: Sequence[Object], /) -> Iterator[Event]:
        """Return a delta of text."""
        self._texts.append(part.reasoning)
        yield self._event("text.delta", delta=part.reasoning)

    def end(self) -> Iterator[Event]:
        """Return its whole text."""
        part = self._part()
        yield self._event("text.done", text=part["text"])
        yield self._event("part.done", part=part)

    def _part(self) -> Object:
        kind = "summary_text" if self._as_summary else "reasoning_text"
        return {"type": kind, "text": "".join(self._texts)}

    def _event(self, name: str, **fields: object) -> Event:
        if self._as_summary:
            return f"reasoning_summary_{name}", {**_FIRST_SUMMARY, **fields}
        prefix = "content_" if name.startswith("part") else "reasoning_"
        return prefix + name, {**_FIRST, **fields}


class OpenCall:
    """A call of a function, which comes whole."""

    def __init__(self, unique: str, call: ToolCall) -> None:
        """Begin a call. `unique` is part of its id."""
        self.id = f"fc_{unique}"
        self._call = call

    def write(self, status: str) -> Object:
        """Return it as it is now: without arguments while it has only been added."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": "" if status == IN_PROGRESS else self._call.arguments_json,
        }

    def start(self) -> Iterator[Event]:
        """Return nothing."""
        yield from ()

    def add(self, _: AnswerPart, __: Sequence[Object], /) -> Iterator[Event]:
        """Return the arguments as one delta."""
        yield "function_call_arguments.delta", {"delta": self._call.arguments_json}

    def end(self) -> Iterator[Event]:
        """Return the arguments."""
        done = {"name": self._call.name, "arguments": self._call.arguments_json}
        yield "function_call_arguments.done", done


def open_item(part: AnswerPart, unique: str, *, as_summary: bool) -> OpenItem:
    """Return the item that a part of an answer begins."""
    if part.tool_call is not None:
        return OpenCall(unique, part.tool_call)
    if part.reasoning:
        return OpenReasoning(unique, as_summary=as_summary)
    return OpenMessage(unique)
