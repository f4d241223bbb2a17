"""Ollama's requests in mlxd's words."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from mlxd import Chat, ChatMessage, FormatKind, ResponseFormat, SamplingOptions, ToolCall
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.ollama import requests as r
from mlxd_gateway.ollama.asks import ask_chat, ask_generate, keep_alive_s


def generate_of(**fields: Any) -> Ask:
    """Return what a completion's request with these fields asks."""
    body = {"model": "m", "prompt": "p", **fields}
    return ask_generate(msgspec.json.decode(json.dumps(body), type=r.GenerateRequest))


def test_options_have_mlxds_names() -> None:
    """num_predict below 1 is no bound; a stop may stand alone."""
    options = {
        "temperature": 0.1, "top_k": 2, "top_p": 0.3, "min_p": 0.4, "repeat_penalty": 1.5,
        "presence_penalty": 0.6, "frequency_penalty": 0.7, "repeat_last_n": 8, "seed": 9,
        "num_predict": 10, "stop": "x",
    }  # fmt: skip
    ask = generate_of(options=options)
    assert ask.sampling == SamplingOptions(
        temperature=0.1, top_k=2, top_p=0.3, min_p=0.4, repetition_penalty=1.5,
        presence_penalty=0.6, frequency_penalty=0.7, repeat_last_n=8, seed=9,
    )  # fmt: skip
    assert (ask.max_tokens, ask.stop) == (10, ("x",))
    assert generate_of(options={"num_predict": -1}).max_tokens is None
    assert ask.rename("sampling.repetition_penalty") == "options.repeat_penalty"
    assert ask.rename("sampling.top_p") == "options.top_p"


def test_a_prompt_is_a_turn_of_a_chat_unless_raw() -> None:
    """Where a model has no template for chats, system and prompt are continued."""
    ask = generate_of(system="s")
    assert isinstance(ask.prompt, Chat)
    assert ask.prompt.messages == (ChatMessage("system", "s"), ChatMessage("user", "p"))
    assert ask.plain == "s\n\np"
    raw = generate_of(raw=True)
    assert (raw.prompt, raw.plain) == ("p", None)
    with pytest.raises(BadField):
        generate_of(raw=True, system="s")
    with pytest.raises(BadField):
        generate_of(raw=True, think="high")


def test_messages() -> None:
    """Arguments are objects in JSON, and JSON on mlxd's wire."""
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "c", "thinking": "t", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "r"},
    ]
    body = json.dumps({"model": "m", "messages": messages, "think": "high"})
    prompt = ask_chat(msgspec.json.decode(body, type=r.ChatRequest)).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages == (
        ChatMessage("assistant", "c", "t", (ToolCall("f", '{"a": 1}'),)),
        ChatMessage("tool", "r", name="f"),
    )
    variables = {"enable_thinking": True, "reasoning_effort": "high"}
    assert json.loads(prompt.variables_json) == variables


FORMATS = [
    ("", None),
    (None, None),
    ("json", ResponseFormat(FormatKind.JSON_OBJECT)),
    ({"type": "object"}, ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "object"}')),
]


@pytest.mark.parametrize(("given_format", "expected"), FORMATS)
def test_formats(given_format: Any, expected: ResponseFormat | None) -> None:
    """A word, a schema, or none."""
    assert generate_of(format=given_format).response_format == expected


def test_other_formats_are_refused() -> None:
    """Neither the word nor an object."""
    with pytest.raises(BadField):
        generate_of(format="xml")


STAYS = [(None, None), (0, 0.0), ("0", 0.0), (90, 90.0), ("5m", 300.0), (-1, math.inf)]


@pytest.mark.parametrize(("value", "seconds"), STAYS)
def test_how_long_a_model_stays(value: float | str | None, seconds: float | None) -> None:
    """Seconds, a duration, or for ever."""
    assert keep_alive_s(value) == seconds


def test_no_duration_is_refused() -> None:
    """By the field's name."""
    with pytest.raises(BadField) as caught:
        keep_alive_s("soon")
    assert caught.value.failure.field == "keep_alive"
