"""The rules change chats of every API, and nothing where they are switched off."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd.v1 import inference_pb2
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.gateways import gateway_over
from tests.support.spoken import answer_with_text

DATE = "Today's date: 2026-11-24"
SYSTEM = f"Be brief.\n{DATE}"
MOVED = [("system", "Be brief."), ("user", f"<system-reminder>\n{DATE}\n</system-reminder>\n\nhi")]
AS_SENT = [("system", SYSTEM), ("user", "hi")]
SAID = {"role": "user", "content": "hi"}
IN_CHAT = {"model": "demo", "messages": [{"role": "system", "content": SYSTEM}, SAID]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": IN_CHAT,
    "/v1/responses": {"model": "demo", "instructions": SYSTEM, "input": "hi"},
    "/v1/messages": {"model": "demo", "system": SYSTEM, "messages": [SAID], "max_tokens": 4},
    "/api/chat": {**IN_CHAT, "stream": False},
    "/api/generate": {"model": "demo", "system": SYSTEM, "prompt": "hi", "stream": False},
}


def chats(fake: FakeServer) -> list[list[tuple[str, str]]]:
    """Return the role and the text of each message of each chat that came."""
    requests = [each for each in fake.requests if isinstance(each, inference_pb2.GenerateRequest)]
    return [[(one.role, one.content) for one in each.chat.messages] for each in requests]


@pytest.mark.asyncio
@pytest.mark.parametrize(("agent_rules", "messages"), [(True, MOVED), (False, AS_SENT)])
@pytest.mark.parametrize("path", BODIES)
async def test_a_date_is_moved(
    path: str, agent_rules: bool, messages: list[tuple[str, str]]
) -> None:
    """By default, whichever way it is sent; otherwise it stays."""
    async with (
        serving(Answers(generate=answer_with_text())) as fake,
        gateway_over(fake.address, agent_rules=agent_rules) as web,
    ):
        assert (await web.post(path, BODIES[path])).status_code == 200
        assert chats(fake) == [messages]


@pytest.mark.asyncio
async def test_a_response_is_kept_as_it_was_sent() -> None:
    """What goes on from it is changed as a whole: what comes first is what came first before."""
    async with (
        serving(Answers(generate=answer_with_text())) as fake,
        gateway_over(fake.address) as web,
    ):
        said = [{"role": "developer", "content": SYSTEM}, SAID]
        first = (await web.post("/v1/responses", {"model": "demo", "input": said})).json()
        listed = (await web.http.get(f"/v1/responses/{first['id']}/input_items?order=asc")).json()
        texts = [item["content"][0]["text"] for item in listed["data"]]
        assert texts == [SYSTEM, "hi"]
        more = {"model": "demo", "input": "more", "previous_response_id": first["id"]}
        assert (await web.post("/v1/responses", more)).status_code == 200
        before, after = chats(fake)
        assert before == [("system", "Be brief."), MOVED[1]]
        assert after[: len(before)] == before
        assert [role for role, _ in after[len(before) :]] == ["assistant", "user"]
