"""What is neither text nor image is refused by name over every API, never left out of a prompt."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mlxd_gateway.anthropic import requests as anthropic
from mlxd_gateway.common.bodies import decode
from mlxd_gateway.common.failures import Refused
from mlxd_gateway.common.fates import refuse
from mlxd_gateway.ollama import requests as ollama
from mlxd_gateway.openai import requests as openai
from mlxd_gateway.openai.responses.requests import ResponseRequest

ADDRESS = {"url": "data:video/mp4;base64,AA=="}
SOUND = {"data": "AA==", "format": "wav"}
SOURCE = {"type": "base64", "media_type": "video/mp4", "data": "AA=="}
PARTS: list[tuple[type[msgspec.Struct], dict[str, Any], str]] = [
    (openai.ChatRequest, {"type": "video_url", "video_url": ADDRESS}, "type"),
    (openai.ChatRequest, {"type": "video", "video": "AA=="}, "type"),
    (openai.ChatRequest, {"type": "audio_url", "audio_url": ADDRESS}, "type"),
    (openai.ChatRequest, {"type": "input_audio", "input_audio": SOUND}, "input_audio"),
    (ResponseRequest, {"type": "input_video", "video_url": "data:,"}, "type"),
    (ResponseRequest, {"type": "input_audio", "input_audio": SOUND}, "type"),
    (anthropic.MessageRequest, {"type": "video", "source": SOURCE}, "type"),
    (anthropic.MessageRequest, {"type": "audio", "source": SOURCE}, "type"),
    (anthropic.CountRequest, {"type": "video", "source": SOURCE}, "type"),
]


def problem_of(kind: type[msgspec.Struct], body: dict[str, Any]) -> str:
    """Return the field that a request is refused by."""
    with pytest.raises(Refused) as caught:
        refuse(decode(msgspec.json.Decoder(kind), json.dumps(body).encode()))
    return caught.value.failure.field


@pytest.mark.parametrize(("kind", "part", "field"), PARTS)
def test_a_part_is_refused_where_it_stands(
    kind: type[msgspec.Struct], part: dict[str, Any], field: str
) -> None:
    """Behind a text that alone would have been an answerable question."""
    text = {"type": "input_text" if kind is ResponseRequest else "text", "text": "what is it?"}
    messages = [{"type": "message", "role": "user", "content": [text, part]}]
    if kind is not ResponseRequest:
        del messages[0]["type"]
    name = "input" if kind is ResponseRequest else "messages"
    limit = {"max_tokens": 1} if kind is anthropic.MessageRequest else {}
    body = {"model": "m", name: messages, **limit}
    assert problem_of(kind, body) == f"{name}[0].content[1].{field}"


@pytest.mark.parametrize("field", ["videos", "audio", "audios"])
@pytest.mark.parametrize("kind", [ollama.ChatRequest, ollama.GenerateRequest])
def test_ollamas_fields_are_images_alone(kind: type[msgspec.Struct], field: str) -> None:
    """Beside a message's text, or a prompt, there is no field for anything else."""
    if kind is ollama.ChatRequest:
        message = {"role": "user", "content": "what is it?", field: ["AA=="]}
        body: dict[str, Any] = {"model": "m", "messages": [message]}
        assert problem_of(kind, body) == f"messages[0].{field}"
        return
    assert problem_of(kind, {"model": "m", "prompt": "what is it?", field: ["AA=="]}) == field
