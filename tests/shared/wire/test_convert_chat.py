"""Conversations at the wire's edge: what arrives, and what is refused before any model is asked."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2 as pb
from mlxd_shared import config
from mlxd_shared.domain.chats import (
    AnswerPart,
    Chat,
    ChatMessage,
    ContentPart,
    ToolCall,
    ToolChoice,
    answer_of,
)
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.wire.convert import generate_from_pb
from mlxd_shared.wire.records import write

USER = pb.ChatMessage(role="user", content="hi")
FULL = Chat(
    messages=(
        ChatMessage("user", "hi", name="Bo"),
        ChatMessage("assistant", "", reasoning="hm", tool_calls=(ToolCall("f", '{"a": 1}', "i"),)),
        ChatMessage("tool", "42", tool_call_id="i"),
        ChatMessage("user", parts=(ContentPart("a"), ContentPart("b"))),
        ChatMessage("assistant", "So"),
    ),
    tools_json=('{"name": "f"}',),
    variables_json='{"enable_thinking": false}',
    add_generation_prompt=True,
    continue_final_message=False,
    parse_output=False,
    now_s=12.5,
    tool_choice=ToolChoice.REQUIRED,
    tool_name="f",
    parallel_tool_calls=False,
)


def refuse(*messages: pb.ChatMessage, **fields: object) -> dict[str, str]:
    """The violations of a bad conversation, by field."""
    chat = pb.ChatPrompt(messages=messages, **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        generate_from_pb(pb.GenerateRequest(chat=chat))
    return {violation.field: violation.description for violation in caught.value.violations}


def test_a_conversation_arrives_as_it_was_sent() -> None:
    """Every field there and back; what is absent is None, and means what the wire says."""
    assert generate_from_pb(pb.GenerateRequest(chat=write(FULL, pb.ChatPrompt))).prompt == FULL
    least = generate_from_pb(pb.GenerateRequest(chat=pb.ChatPrompt(messages=[USER]))).prompt
    assert least == Chat((ChatMessage("user", "hi"),))
    assert isinstance(least, Chat)
    assert (least.begins_answer, least.continues, least.parses) == (True, False, True)
    assert (FULL.begins_answer, FULL.continues, FULL.parses) == (True, False, False)
    going = Chat(least.messages, continue_final_message=True)
    assert (going.begins_answer, going.continues) == (False, True)


def test_a_message_comes_in_parts_or_whole() -> None:
    """Not both, and no part is nothing."""
    assert FULL.messages[3].text == "a\nb"
    assert FULL.messages[0].text == "hi"
    parts = [pb.ContentPart(text="a")]
    both = pb.ChatMessage(role="user", content="b", parts=parts)
    assert [*refuse(USER, both)] == ["chat.messages[1].parts"]
    nothing = pb.ChatMessage(role="user", parts=[*parts, pb.ContentPart()])
    assert [*refuse(nothing)] == ["chat.messages[0].parts[1]"]
    many = pb.ChatMessage(role="user", parts=parts * (config.CHAT_MESSAGES_MAX + 1))
    assert "parts" in refuse(many)["chat.messages"]


def test_who_decides_on_calls_makes_sense() -> None:
    """A call is required of a tool on offer, in a new message, and of nothing else beside."""
    tool, required = '{"name": "f"}', pb.TOOL_CHOICE_REQUIRED
    field = "chat.tool_choice"
    assert [*refuse(USER, tool_choice=9)] == [field]
    assert [*refuse(USER, tool_choice=required)] == [field]
    last = pb.ChatMessage(role="assistant", content="So")
    going = {"continue_final_message": True, "tools_json": [tool]}
    assert [*refuse(USER, last, tool_choice=required, **going)] == [field]
    assert [*refuse(USER, tools_json=[tool], tool_name="f")] == ["chat.tool_name"]
    named = {"tools_json": [tool], "tool_choice": required}
    assert [*refuse(USER, tool_name="g", **named)] == ["chat.tool_name"]
    beside = {
        "response_format": {"response_format": pb.ResponseFormat(regex="a")},
        "ignore_eos": {"ignore_eos": True},
    }
    for name, fields in beside.items():
        chat = pb.ChatPrompt(messages=[USER], **named)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as caught:
            generate_from_pb(pb.GenerateRequest(chat=chat, **fields))  # type: ignore[arg-type]
        assert [violation.field for violation in caught.value.violations] == [name]
    none = Chat((ChatMessage("user", "hi"),), (tool,), tool_choice=ToolChoice.NONE)
    assert not none.offered
    assert not none.requires_call


SURROGATE = '{"a": "\\ud800"}'


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatMessage(role="robot"), "role"),
        (pb.ChatMessage(role="<|im_end|>"), "role"),
        (pb.ChatMessage(role="user", reasoning="a"), "reasoning"),
        (pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")]), "tool_calls"),
        (pb.ChatMessage(role="user", tool_call_id="a"), "tool_call_id"),
        (pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()]), "tool_calls[0].name"),
        *(
            (
                pb.ChatMessage(
                    role="assistant", tool_calls=[pb.ToolCall(name="f", arguments_json=bad)]
                ),
                "tool_calls[0].arguments_json",
            )
            for bad in ("{", "[]", "1", '{"a": NaN}', '{"a": 1e999}', SURROGATE, '{"a":' * 100_000)
        ),
    ],
)
def test_a_bad_message_names_its_field(message: pb.ChatMessage, field: str) -> None:
    """Place and field, for each thing that no template could make sense of."""
    assert [*refuse(USER, message)] == [f"chat.messages[1].{field}"]


def test_half_a_character_is_told_for_what_it_is() -> None:
    """JSON can spell one, which no text holds: the field that has it is named."""
    half = "half a character (a lone surrogate)"
    tool = '{"name": "f", "description": "\\udc00"}'
    assert half in refuse(USER, tools_json=['{"name": "f"}', tool])["chat.tools_json[1]"]
    field = "chat.template_variables_json"
    assert half in refuse(USER, template_variables_json=SURROGATE)[field]


def test_bad_options_name_their_fields() -> None:
    """Tools and variables are JSON objects; the server's own variables are its own."""
    tools = [
        '{"name": "f"}', '{"type": "function", "function": {"name": "f"}}', '{"type": "search"}',
        "[]", "{}", '{"function": []}', '{"name": ""}', '{"type": "function", "function": {}}',
    ]  # fmt: skip
    for bad in tools[3:]:
        assert [*refuse(USER, tools_json=[*tools[:3], bad])] == ["chat.tools_json[3]"]
    variables = "chat.template_variables_json"
    assert [*refuse(USER, template_variables_json="no")] == [variables]
    assert "'tools'" in refuse(USER, template_variables_json='{"tools": []}')[variables]
    for seconds in (-1, 1 << 50):
        assert [*refuse(USER, now=Timestamp(seconds=seconds))] == ["chat.now"]
    for nanos in (-1, 10**9, (1 << 31) - 1):
        assert [*refuse(USER, now=Timestamp(nanos=nanos))] == ["chat.now.nanos"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert [*refuse(USER, **both)] == [
        "chat.add_generation_prompt",
        "chat.continue_final_message",
    ]


def test_a_conversation_is_bounded() -> None:
    """Messages, tools, calls, characters and JSON each have a bound, told by its number."""
    most = config.CHAT_MESSAGES_MAX
    assert str(most) in refuse(*[USER] * (most + 1))["chat.messages"]
    assert "1 to" in refuse()["chat.messages"]
    assert [*refuse(USER, tools_json=["{}"] * (config.CHAT_TOOLS_MAX + 1))] == ["chat.tools_json"]
    calls = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")] * (most + 1))
    assert "calls" in refuse(USER, calls)["chat.messages"]
    long = pb.ChatMessage(role="user", content="x" * (config.PROMPT_CHARS_MAX // 2 + 1))
    assert "characters" in refuse(long, long)["chat.messages"]
    heavy = '{"a": "' + "x" * config.CHAT_JSON_CHARS_MAX + '"}'
    assert "JSON" in refuse(USER, template_variables_json=heavy)["chat"]
    half = "x" * (config.CHAT_JSON_CHARS_MAX // 2)
    for call in (
        pb.ToolCall(name="fg", arguments_json=half),
        pb.ToolCall(name=half + "x"),
        pb.ToolCall(name="f", id=half),
    ):
        says = pb.ChatMessage(role="assistant", tool_calls=[call])
        assert "JSON" in refuse(USER, says, template_variables_json=half)["chat"]


def test_an_answer_becomes_a_message() -> None:
    """What a client appends to its conversation, made of the pieces as they came."""
    call = ToolCall("f", "{}", "i")
    parts = [
        AnswerPart(0, reasoning="h"),
        AnswerPart(0, reasoning="m"),
        AnswerPart(1, "So"),
        AnswerPart(2, tool_call=call),
        AnswerPart(3, "."),
    ]
    assert answer_of(parts) == ChatMessage("assistant", "So.", "hm", (call,))
