"""Ollama's endpoints over a scripted controller: whole bodies, as clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import load_steps, model
from tests.support.gateways import gateway_over
from tests.support.spoken import ARGUMENTS, CALL_ID, answer_with_call

MADE = ("created_at", "total_duration")
"""What an answer has of its own: looked at by kind alone."""
COST = {
    "done_reason": "stop",
    "load_duration": 250_000_000,
    "prompt_eval_count": 5,
    "prompt_eval_duration": 10_000_000,
    "eval_count": 5,
    "eval_duration": 500_000_000,
}
CALL = {"id": CALL_ID, "function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}}
SAID = {"thinking": "hmm", "tool_calls": [CALL]}
CHAT = [{"role": "user", "content": "hi"}]
ANSWERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("chat", {"messages": CHAT}, {
        **COST, "message": {"role": "assistant", "content": "Let me see.", **SAID},
    }),
    ("generate", {"prompt": "hi"}, {**COST, "response": "Let me see.", **SAID}),
    ("chat", {}, {"done_reason": "load", "message": {"role": "assistant", "content": ""}}),
    ("generate", {"keep_alive": 0}, {"done_reason": "unload", "response": ""}),
]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "fields", "expected"), ANSWERS)
async def test_an_answer_has_every_field_and_no_other(
    path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Of a chat and a completion, with a prompt and without; what is the moment's apart."""
    answers = Answers(generate=answer_with_call(), load=load_steps())
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        body = {"model": "demo", "stream": False, **fields}
        answer = (await web.post(f"/api/{path}", body)).json()
    made = {name: type(answer.pop(name)) for name in MADE if name in answer}
    assert answer == {"model": "demo", "done": True, **expected}
    has_cost = "eval_count" in expected
    assert made == {"created_at": str, **({"total_duration": int} if has_cost else {})}


@pytest.mark.asyncio
@pytest.mark.parametrize("sees", [False, True])
async def test_a_model_that_sees_has_the_capability(*, sees: bool) -> None:
    """Named as Ollama's clients look for it; without it they send no images."""
    known = model()
    known.has_vision = sees
    async with serving(Answers(models=[known])) as fake, gateway_over(fake.address) as web:
        shown = (await web.post("/api/show", {"model": "demo"})).json()
    named = ["completion", "vision", "tools"] if sees else ["completion", "tools"]
    assert shown["capabilities"] == named
