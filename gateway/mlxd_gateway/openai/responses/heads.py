"""What a response is from its beginning on: its id, and what comes back of its request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from mlxd_gateway.openai.responses import requests as r

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Head:
    """`unique` is part of every id; `created_at` in seconds since the epoch."""

    unique: str
    created_at: int
    fields: dict[str, Any]
    """What comes back of the request."""
    as_summary: bool = False
    """Whether reasoning comes as its summary."""

    @property
    def id(self) -> str:
        """The response's id."""
        return f"resp_{self.unique}"


def head_of(request: r.ResponseRequest, unique: str, created_at: int) -> Head:
    """Return the head of a request's response; nothing of it keeps the request's body alive."""
    reasoning = request.reasoning or r.ReasoningConfig()
    summary = reasoning.summary or reasoning.generate_summary
    format_ = None if request.text is None else request.text.format
    fields = {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": summary},
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} if format_ is None else _copy(format_)},
        "tool_choice": request.tool_choice or "auto",
        "tools": _copy(request.tools or []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
    }
    return Head(unique, created_at, fields, as_summary=summary is not None)


def _copy(value: object) -> msgspec.Raw:
    """Return a value as JSON of its own: parts of a body would keep all of it."""
    return msgspec.Raw(_encode(value))
