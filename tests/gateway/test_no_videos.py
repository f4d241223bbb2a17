"""Videos and sounds are refused by name over every API, before a controller is asked."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from mlxd_gateway.anthropic.requests import NO_SIGHT as ANTHROPIC
from mlxd_gateway.openai.requests import NO_SIGHT as OPENAI
from tests.fakes.mlxd_server import Answers, serving
from tests.support.gateways import gateway_over

DATA = base64.b64encode(b"\0\0\0\x18ftypmp42").decode()
LINK = f"data:video/mp4;base64,{DATA}"
SOURCE = {"type": "base64", "media_type": "video/mp4", "data": DATA}
CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat",
)  # fmt: skip
PARTS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    (CHAT, {"type": "video_url", "video_url": {"url": LINK}}, "type", OPENAI),
    (CHAT, {"type": "audio_url", "audio_url": {"url": LINK}}, "type", OPENAI),
    (CHAT, {"type": "video", "video": [LINK]}, "type", OPENAI),
    (CHAT, {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
     "input_audio", OPENAI),
    (RESPONSES, {"type": "input_video", "video_url": LINK}, "type", OPENAI),
    (RESPONSES, {"type": "input_audio", "input_audio": {"data": DATA}}, "type", OPENAI),
    (MESSAGES, {"type": "video", "source": SOURCE}, "type", ANTHROPIC),
    (MESSAGES, {"type": "audio", "source": SOURCE}, "type", ANTHROPIC),
)  # fmt: skip
NAMED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (OLLAMA, {"content": "a", "videos": [DATA]}, "videos"),
    (OLLAMA, {"content": "a", "audios": [DATA]}, "audios"),
)


async def refusal(path: str, message: dict[str, Any]) -> tuple[int, str]:
    """Return the status and the text of the answer to a chat of one message."""
    said = [{"role": "user", **message}]
    body: dict[str, Any] = {"model": "demo"}
    body["input" if path == RESPONSES else "messages"] = said
    if path == MESSAGES:
        body["max_tokens"] = 4
    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        answer = await web.post(path, body)
        assert not fake.requests
    return answer.status_code, answer.text


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "part", "field", "why"), PARTS)
async def test_a_part_is_refused_by_its_place(
    path: str, part: dict[str, Any], field: str, why: str
) -> None:
    """With what models here take instead."""
    words = {"type": "input_text" if path == RESPONSES else "text", "text": "a"}
    status, text = await refusal(path, {"content": [words, part]})
    assert status == 400
    assert f"content[1].{field}" in text
    assert why in text


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "message", "name"), NAMED)
async def test_a_field_is_refused_by_its_name(
    path: str, message: dict[str, Any], name: str
) -> None:
    """Where an API has no parts."""
    status, text = await refusal(path, message)
    assert status == 400
    assert name in text
