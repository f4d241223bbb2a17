"""Probes of a conversation's fields, through the controller, on a model with a template."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import InvalidRequest
from tests.support.chat_template import ANSWER, PATTERN
from tests.system.wire.probe import Probes, Wire, refusal
from tests.worker.made_tokenizers import EOS_ID

PROBES = Probes()
covering = PROBES.covering
MODEL = "other"
"""The name of the model that has `tests.support.chat_template`."""
Prompt, Message = inference_pb2.ChatPrompt, inference_pb2.ChatMessage
CALL = inference_pb2.ToolCall(id="abc123def", name="f", arguments_json='{"a": 1}')


async def show_template(wire: Wire, expression: str, chat: inference_pb2.ChatPrompt) -> Any:
    """Return what the template was given."""
    chat.template_variables_json = json.dumps({"show": expression})
    error = await refusal(wire.generate(model=MODEL, chat=chat))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.messages"
    return json.loads(
        error.violations[0].description.removeprefix("the model's template refuses: ")
    )


@covering(
    "GenerateRequest.chat",
    "ChatPrompt.messages",
    "ChatPrompt.template_variables_json",
    "ChatMessage.role",
    "ChatMessage.content",
    "ChatMessage.name",
    "ChatMessage.reasoning",
)
async def messages_reach_the_template(wire: Wire) -> None:
    """Each field of a message is what the template sees under the field's usual name."""
    user = Message(role="user", content="hi <|x|>", name="Bo")
    answer = Message(role="assistant", content="yo", reasoning="hm")
    assert await show_template(wire, "messages", Prompt(messages=[user, answer])) == [
        {"role": "user", "content": "hi <|x|>", "name": "Bo"},
        {"role": "assistant", "content": "yo", "reasoning_content": "hm", "thinking": "hm"},
    ]
    error = await refusal(wire.generate(model=MODEL, chat=Prompt(messages=[Message(role="me")])))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.messages[0].role"
    bad = Prompt(messages=[user], template_variables_json='{"messages": []}')
    error = await refusal(wire.generate(model=MODEL, chat=bad))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.template_variables_json"


@covering("ContentPart.media_type")
async def only_images_have_a_media_type(wire: Wire) -> None:
    """It is refused beside a text, and where it is none that is read."""
    for part in (
        inference_pb2.ContentPart(text="a", media_type="image/png"),
        inference_pb2.ContentPart(image=b"a", media_type="image/tiff"),
    ):
        chat = Prompt(messages=[Message(role="user", parts=[part])])
        error = await refusal(wire.generate(model=MODEL, chat=chat))
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "chat.messages[0].parts[0].media_type"


@covering("ChatMessage.parts", "ContentPart.text")
async def parts_are_one_content(wire: Wire) -> None:
    """Joined by line ends; a system message in the middle stays there."""
    parts = [inference_pb2.ContentPart(text=text) for text in ("a", "b")]
    messages = [
        Message(role="user", content="hi"),
        Message(role="system", content="Be short."),
        Message(role="user", parts=parts),
    ]
    assert await show_template(wire, "messages", Prompt(messages=messages)) == [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
    ]


@covering(
    "ChatMessage.tool_calls",
    "ChatMessage.tool_call_id",
    "ToolCall.id",
    "ToolCall.name",
    "ToolCall.arguments_json",
)
async def calls_reach_the_template(wire: Wire) -> None:
    """A call and its answer, which has the name of the tool that was called."""
    messages = [
        Message(role="assistant", tool_calls=[CALL]),
        Message(role="tool", content="42", tool_call_id="abc123def"),
    ]
    assert await show_template(wire, "messages", Prompt(messages=messages)) == [
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "abc123def",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": 1}},
                }
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "abc123def", "name": "f"},
    ]
    messages[0].tool_calls[0].arguments_json = "[]"
    error = await refusal(wire.generate(model=MODEL, chat=Prompt(messages=messages)))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.messages[0].tool_calls[0].arguments_json"


@covering("ChatPrompt.tools_json", "ChatPrompt.now")
async def tools_and_the_time_reach_the_template(wire: Wire) -> None:
    """A tool by its function alone is a function's; the time is the request's own."""
    tool = json.dumps({"name": "f"})
    user = Message(role="user", content="hi")
    assert await show_template(wire, "tools", Prompt(messages=[user], tools_json=[tool])) == [
        {"type": "function", "function": {"name": "f"}}
    ]
    when = Timestamp(seconds=86_400 * 365 * 3)
    assert await show_template(wire, "time", Prompt(messages=[user], now=when)) == 1972
    assert await show_template(wire, "time", Prompt(messages=[user])) > 2025


@covering("ChatPrompt.add_generation_prompt", "ChatPrompt.continue_final_message")
async def the_last_message_is_answered_or_goes_on(wire: Wire) -> None:
    """A prompt begins the assistant's message unless told otherwise; both at once are refused."""
    user, answer = Message(role="user", content="hi"), Message(role="assistant", content="yo ")
    assert await show_template(wire, "begun", Prompt(messages=[user])) is True
    bare = Prompt(messages=[user], add_generation_prompt=False)
    assert await show_template(wire, "begun", bare) is False
    ended = Prompt(messages=[user, answer], add_generation_prompt=False)
    going = Prompt(messages=[user, answer], continue_final_message=True)
    assert await show_template(wire, "begun", Prompt(messages=[user, answer])) is True
    same = [(await wire.generate(model=MODEL, chat=chat))[-1].usage for chat in (ended, going)]
    assert same[0].prompt_tokens == same[1].prompt_tokens
    going.add_generation_prompt = True
    error = await refusal(wire.generate(model=MODEL, chat=going))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.add_generation_prompt"


@covering("ChatPrompt.tool_choice", "ChatPrompt.tool_name", "ChatPrompt.parallel_tool_calls")
async def calls_are_required(wire: Wire) -> None:
    """Of any tool or of one, once or more often; or the model is not shown the tools."""
    tools = [json.dumps({"name": name, "strict": True}) for name in ("f", "g")]
    chat = Prompt(messages=[Message(role="user", content="hi")], tools_json=tools)
    chat.tool_choice = inference_pb2.TOOL_CHOICE_REQUIRED
    bias = {EOS_ID: -100.0}
    for letter in "to":  # as a call's mark goes on, where one of reasoning would go on otherwise
        request = inference_pb2.TokenizeRequest(model=MODEL, text=letter, add_special_tokens=False)
        (token_id,) = (await wire.inference.Tokenize(request)).token_ids
        bias[token_id] = 100.0
    sampling = types_pb2.SamplingOptions(seed=1, logit_bias=bias)
    fields: dict[str, Any] = {"model": MODEL, "sampling": sampling, "max_tokens": 300}

    async def names() -> list[str]:
        messages = await wire.generate(chat=chat, **fields)
        parts = [part for message in messages for part in message.parts]
        return [part.tool_call.name for part in parts if part.HasField("tool_call")]

    assert len(await names()) > 1
    chat.parallel_tool_calls = False
    assert len(await names()) == 1
    for name in ("f", "g"):
        chat.tool_name = name
        assert await names() == [name]
    chat.tool_name = "h"
    error = await refusal(wire.generate(chat=chat, **fields))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.tool_name"
    chat.ClearField("tool_name")
    chat.tool_choice = inference_pb2.TOOL_CHOICE_NONE
    assert await show_template(wire, "tools", chat) is None


@covering("ChatPrompt.parse_output")
async def answers_come_in_parts(wire: Wire) -> None:
    """Reasoning, text and a call, or the text as it is."""
    chat = Prompt(messages=[Message(role="user", content="hi")], tools_json=['{"name": "f"}'])
    fields: dict[str, Any] = {
        "model": MODEL,
        "chat": chat,
        "response_format": inference_pb2.ResponseFormat(regex=PATTERN),
        "max_tokens": 200,
    }
    parts = [part for message in await wire.generate(**fields) for part in message.parts]
    assert {part.index for part in parts} == {0, 1, 2}
    assert "".join(part.reasoning for part in parts) == "hm"
    (call,) = [part.tool_call for part in parts if part.HasField("tool_call")]
    assert (call.name, call.arguments_json, len(call.id)) == ("f", '{"a": 1}', 9)
    chat.parse_output = False
    messages = await wire.generate(**fields)
    assert "".join(message.text for message in messages) == ANSWER
    assert not any(message.parts for message in messages)
