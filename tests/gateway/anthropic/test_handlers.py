"""Anthropic's endpoints over a scripted controller: whole bodies, as clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxd.v1 import inference_pb2
from tests.fakes.mlxd_server import Answers, serving
from tests.support.gateways import gateway_over
from tests.support.spoken import ARGUMENTS, CALL_ID, answer_with_call

MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "well?"},
]
ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/messages": ({"max_tokens": 9}, {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [
            {"type": "thinking", "thinking": "hmm", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": CALL_ID, "name": "weather", "input": json.loads(ARGUMENTS)},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3, "output_tokens": 5, "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
        },
    }),
    "/v1/messages/count_tokens": ({}, {"input_tokens": 5}),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ANSWERS)
async def test_an_answer_has_every_field_and_no_other(path: str) -> None:
    """But for the id of a message; and each turn of the conversation was asked in its role."""
    fields, expected = ANSWERS[path]
    async with (
        serving(Answers(generate=answer_with_call())) as fake,
        gateway_over(fake.address) as web,
    ):
        answer = (await web.post(path, {"model": "demo", "messages": MESSAGES, **fields})).json()
    answer.pop("id", None)
    assert answer == expected
    (request,) = [r for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]
    turns = [{"role": m.role, "content": m.content} for m in request.chat.messages]
    assert turns == MESSAGES
