"""OpenAI's endpoints over a scripted controller: whole bodies, as clients read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import model
from tests.support.gateways import gateway_over
from tests.support.spoken import ARGUMENTS, CALL_ID, answer_with_call

MADE = ("id", "created")
"""What an answer has of its own: looked at by kind alone."""
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 5,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
CALL = {"id": CALL_ID, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
MESSAGE = {
    "role": "assistant", "content": "Let me see.", "refusal": None, "tool_calls": [CALL],
    "reasoning_content": "hmm",
}  # fmt: skip
ENTRY = {"object": "model", "created": 0, "owned_by": "mlxd"}
ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (CHAT, {
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {"index": 0, "message": MESSAGE, "finish_reason": "tool_calls", "logprobs": None}
        ],
        "usage": USAGE,
    }),
    "/v1/completions": ({"model": "demo", "prompt": "hi"}, {
        "object": "text_completion",
        "model": "demo",
        "choices": [
            {"index": 0, "text": "Let me see.", "finish_reason": "stop", "logprobs": None}
        ],
        "usage": USAGE,
    }),
    "/v1/embeddings": ({"model": "demo", "input": ["a", "abc"]}, {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1, 0.125]},
            {"object": "embedding", "index": 1, "embedding": [3, 0.125]},
        ],
        "model": "demo",
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    }),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ANSWERS)
async def test_an_answer_has_every_field_and_no_other(path: str) -> None:
    """What differs from answer to answer apart."""
    body, expected = ANSWERS[path]
    async with (
        serving(Answers(generate=answer_with_call())) as fake,
        gateway_over(fake.address) as web,
    ):
        answer = (await web.post(path, body)).json()
    made = {name: type(answer.pop(name)) for name in MADE if name in answer}
    assert answer == expected
    assert made == ({} if path == "/v1/embeddings" else {"id": str, "created": int})


@pytest.mark.asyncio
async def test_models_are_listed_by_every_name() -> None:
    """And each is shown by any of them."""
    async with serving(Answers(models=[model()])) as fake, gateway_over(fake.address) as web:
        listed = (await web.http.get("/v1/models")).json()
        shown = (await web.http.get("/v1/models/tiny")).json()
    demo, tiny = ({"id": name, **ENTRY} for name in ("demo", "tiny"))
    assert listed == {"object": "list", "data": [demo, tiny]}
    assert shown == tiny
