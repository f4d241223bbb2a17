"""Signs of life while a model is waited for, and while a long prompt is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import LIMIT_S
from tests.support.gateways import gateway_over

PINGS = 3
"""One with the head of the answer, one as nothing has come, and one after a while of nothing."""


@pytest.mark.asyncio
async def test_a_stream_without_a_token_says_that_it_lives() -> None:
    """Its head comes before the first token, then pings; a client that leaves ends the request."""
    question = {"role": "user", "content": "u"}
    body = {"model": "m", "max_tokens": 1, "stream": True, "messages": [question]}
    silent = Answers(models=[replies.model("m")], hold=True)
    async with serving(silent) as fake, gateway_over(fake.address) as web:
        lines: list[str] = []
        async with web.http.stream("POST", "/v1/messages", content=json.dumps(body)) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count("event: ping") == PINGS:
                    break
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)

    assert lines[0] == "event: message_start"
    assert [line for line in lines if line.startswith("event:")][1:] == ["event: ping"] * PINGS


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("state", "comment"),
    [("LOADING", ": LOADING 50%"), ("QUEUED", ": queued"), ("READY", ": waiting")],
)
async def test_a_wait_is_told_in_a_comment(path: str, state: str, comment: str) -> None:
    """How far a load has come, or that the request is queued: no event, so no client reads it."""
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "u"}]}
    if path != "/v1/chat/completions":
        fields = {"input" if path == "/v1/responses" else "prompt": "u"}
    silent = Answers(models=[replies.model("m", state=state)], hold=True)
    async with serving(silent) as fake, gateway_over(fake.address) as web:
        body = {"model": "m", "stream": True, **fields}
        async with web.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            comments = (line async for line in answer.aiter_lines() if line.startswith(":"))
            assert await anext(comments) == comment
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)
