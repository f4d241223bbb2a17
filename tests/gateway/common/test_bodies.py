"""Bodies become structs strictly, and what is wrong is named."""

from __future__ import annotations

import msgspec
import pytest

from mlxd_gateway.anthropic import requests as anthropic
from mlxd_gateway.common.bodies import decode
from mlxd_gateway.common.failures import FailureKind, Refused
from mlxd_gateway.ollama import requests as ollama
from mlxd_gateway.openai import requests as openai
from mlxd_gateway.openai.responses.requests import ResponseRequest
from mlxd_shared import config

DECODER = msgspec.json.Decoder(openai.ChatRequest)
CASES = [
    (b'{"messages": [], "temperature": "hot"}', "temperature", "expected `float | null`"),
    (b'{"messages": [{"role": "king", "content": ""}]}', "messages[0].role", "king"),
    (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content", "got `int`"),
    (b'{"messages": [{"role": "user"}]}', "messages[0].content", "is needed"),
    (b'{"model": "demo"}', "messages", "is needed"),
    (b'{"messages": [], "temprature": 1}', "temprature", "is no field"),
    (b"[]", "body", "expected `object`"),
]


@pytest.mark.parametrize(("body", "field", "problem"), CASES)
def test_what_is_wrong_is_named(body: bytes, field: str, problem: str) -> None:
    """A wrong type, a missing field and one that there is not: each by its path."""
    with pytest.raises(Refused) as caught:
        decode(DECODER, body)
    failure = caught.value.failure
    assert (failure.kind, failure.field) == (FailureKind.INVALID, field)
    assert problem in failure.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"messages": [}',
        b"[" * 100_000,
        b'{"messages": [], "chat_template_kwargs": {"a": "\xff"}}',
        b'{"messages": [], "tools": [{"function": {"name": "", "parameters": {"\xc3": 1}}}]}',
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    """Half a text, bytes that are none (where they are only passed on, too), endless nesting."""
    with pytest.raises(Refused) as caught:
        decode(DECODER, body)
    assert caught.value.failure.kind is FailureKind.INVALID


TEXT = {"role": "user", "content": "a"}
FUNCTION = {"function": {"name": "f"}}
MANY: list[tuple[type[msgspec.Struct], str, dict[str, object]]] = [
    (kind, name, body)
    for kind, rest, tool in (
        (openai.ChatRequest, {"messages": [TEXT]}, FUNCTION),
        (anthropic.MessageRequest, {"messages": [TEXT], "max_tokens": 1}, {"name": "f"}),
        (anthropic.CountRequest, {"messages": [TEXT]}, {"name": "f"}),
        (ollama.ChatRequest, {"model": "m"}, FUNCTION),
    )
    for name, body in (
        ("messages", {**rest, "messages": [TEXT] * (config.CHAT_MESSAGES_MAX + 1)}),
        ("tools", {**rest, "tools": [tool] * (config.CHAT_TOOLS_MAX + 1)}),
    )
]
STOPS = ["a"] * (config.STOP_STRINGS_MAX + 1)
TEXTS = ["a"] * (config.EMBED_TEXTS_MAX + 1)
BIASES = {str(index): 1 for index in range(config.LOGIT_BIAS_MAX + 1)}
MANY += [
    (openai.CompletionRequest, "stop", {"prompt": "a", "stop": STOPS}),
    (openai.CompletionRequest, "logit_bias", {"prompt": "a", "logit_bias": BIASES}),
    (openai.EmbeddingRequest, "input", {"input": TEXTS}),
    (ResponseRequest, "input",
     {"input": [{"type": "message", **TEXT}] * (config.HTTP_ITEMS_MAX + 1)}),
    (ResponseRequest, "tools", {"input": "a", "tools": [
        {"type": "function", "name": "f"}] * (config.CHAT_TOOLS_MAX + 1)}),
    (anthropic.MessageRequest, "stop_sequences",
     {"messages": [], "max_tokens": 1, "stop_sequences": STOPS}),
    (ollama.GenerateRequest, "options.stop", {"model": "m", "options": {"stop": STOPS}}),
    (ollama.GenerateRequest, "keep_alive", {"model": "m", "keep_alive": "soon" * 99}),
    (ollama.EmbedRequest, "input", {"model": "m", "input": TEXTS}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "body"), MANY)
def test_what_is_too_much_is_refused_at_the_door(
    kind: type[msgspec.Struct], field: str, body: dict[str, object]
) -> None:
    """By the field's name and the bound, and without a word of what it holds."""
    with pytest.raises(Refused) as caught:
        decode(msgspec.json.Decoder(kind), msgspec.json.encode(body))
    failure = caught.value.failure
    assert failure.field == field
    assert "of length <= " in failure.message
    assert len(failure.message) < 100
