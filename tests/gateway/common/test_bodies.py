"""Bodies become structs strictly, and what is wrong is named."""

from __future__ import annotations

import msgspec
import pytest

from mlxd_gateway.common.bodies import decode
from mlxd_gateway.common.failures import FailureKind, Refused
from mlxd_gateway.openai.requests import ChatRequest

DECODER = msgspec.json.Decoder(ChatRequest)
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
