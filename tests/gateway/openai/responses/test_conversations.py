"""Items become the messages that a chat would send, whose fields keep the request's names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mlxd import ChatMessage, ContentPart, ToolCall
from mlxd_gateway.openai.responses.conversations import Conversation
from mlxd_gateway.openai.responses.inputs import add_types
from mlxd_gateway.openai.responses.requests import ResponseRequest

USER = {"role": "user", "content": "u"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [
    {"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
SHOWN = {"type": "input_image", "image_url": "data:image/png;base64,AP8=", "detail": "low"}
IMAGE = ContentPart(image=b"\x00\xff", media_type="image/png")


def message_of(text: str) -> dict[str, Any]:
    """Return what an assistant said, as a response has it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "m", "status": "completed", "role": "assistant",
            "content": [part]}  # fmt: skip


def converse(*items: dict[str, Any]) -> tuple[tuple[ChatMessage, ...], dict[str, str]]:
    """Return the messages of items, and the names of their fields."""
    body = add_types(json.dumps({"input": items}).encode())
    request = msgspec.json.decode(body, type=ResponseRequest)
    assert not isinstance(request.input, str)
    conversation = Conversation()
    conversation.extend((f"input[{index}]", item) for index, item in enumerate(request.input))
    return conversation.end()


ONE = ChatMessage("assistant", "a", "hm", (ToolCall("f", '{"a":1}', "c1"),))
CASES: list[tuple[list[dict[str, Any]], list[ChatMessage]]] = [
    ([USER], [ChatMessage("user", "u")]),
    ([{"role": "developer", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
     [ChatMessage("developer", "a\nb")]),
    ([USER, THOUGHT, message_of("a"), CALL, RESULT],
     [ChatMessage("user", "u"), ONE, ChatMessage("tool", "rain", tool_call_id="c1")]),
    ([message_of("a"), message_of("b")],
     [ChatMessage("assistant", "a"), ChatMessage("assistant", "b")]),
    ([message_of("a"), CALL, message_of("b")],
     [ChatMessage("assistant", "ab", tool_calls=(ToolCall("f", '{"a":1}', "c1"),))]),
    ([THOUGHT, message_of("a"), THOUGHT, message_of("b")],
     [ChatMessage("assistant", "a", "hm"), ChatMessage("assistant", "b", "hm")]),
    ([CALL, {**CALL, "call_id": "c2"}, RESULT],
     [ChatMessage("assistant", "", tool_calls=(
         ToolCall("f", '{"a":1}', "c1"), ToolCall("f", '{"a":1}', "c2"))),
      ChatMessage("tool", "rain", tool_call_id="c1")]),
    ([THOUGHT], [ChatMessage("assistant", "", "hm")]),
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}],
     [ChatMessage("assistant", "", "short")]),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
     [ChatMessage("assistant", "no")]),
    ([{**RESULT, "name": "f", "output": [{"type": "input_text", "text": "sun"}]}],
     [ChatMessage("tool", "sun", tool_call_id="c1", name="f")]),
    ([{"role": "user", "content": [SHOWN, {"type": "input_text", "text": "a"}]},
      {**RESULT, "output": [{"type": "input_text", "text": "b"}, SHOWN]}],
     [ChatMessage("user", parts=(IMAGE, ContentPart("a"))),
      ChatMessage("tool", tool_call_id="c1", parts=(ContentPart("b"), IMAGE))]),
]  # fmt: skip


@pytest.mark.parametrize(("items", "messages"), CASES)
def test_items_become_messages(items: list[dict[str, Any]], messages: list[ChatMessage]) -> None:
    """What an assistant thought, said and called in one go is one message."""
    assert list(converse(*items)[0]) == messages


def test_fields_of_messages_have_the_names_of_their_items() -> None:
    """Also where several items are one message."""
    _, names = converse(USER, THOUGHT, message_of("a"), CALL, CALL, RESULT)
    assert names["chat.messages[0]"] == "input[0]"
    assert names["chat.messages[1]"] == "input[1]"
    assert names["chat.messages[1].tool_calls[1]"] == "input[4]"
    assert names["chat.messages[1].tool_calls[1].id"] == "input[4].call_id"
    assert names["chat.messages[2].content"] == "input[5].output"
    assert names["chat.messages[2].tool_call_id"] == "input[5].call_id"
    calls = [name for name in names if ".tool_calls" in name]
    assert list(names).index("chat.messages[1]") > max(map(list(names).index, calls))
