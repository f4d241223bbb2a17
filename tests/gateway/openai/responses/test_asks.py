"""What a request for a response asks, and what contradicts itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mlxd import Chat, ChatMessage, FormatKind, ResponseFormat, SamplingOptions, ToolChoice
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import refuse
from mlxd_gateway.openai.responses.asks import ask_response
from mlxd_gateway.openai.responses.inputs import add_types
from mlxd_gateway.openai.responses.items import Message
from mlxd_gateway.openai.responses.requests import LOGPROBS, ResponseRequest
from mlxd_shared import config

SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
TOOL = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": True,
}


def read(**fields: Any) -> ResponseRequest:
    """Return the request with these fields, once it is clear that none is refused."""
    body = add_types(json.dumps({"input": "hi", **fields}).encode())
    request = msgspec.json.decode(body, type=ResponseRequest)
    refuse(request)
    return request


def ask_of(**fields: Any) -> Ask:
    """Return what a request with these fields asks."""
    return ask_response(read(**fields), ())


def chat_of(**fields: Any) -> Chat:
    """Return the conversation of a request with these fields."""
    prompt = ask_of(**fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_every_sampling_field_is_passed_on() -> None:
    """Under mlxd's names, which are the request's own again in errors."""
    ask = ask_of(
        model="m", temperature=0.5, top_p=0.4, top_k=3, min_p=0.1, repetition_penalty=1.1, seed=9,
        max_output_tokens=5, include=[LOGPROBS], top_logprobs=2, text={"format": SCHEMA},
    )  # fmt: skip
    assert ask.sampling == SamplingOptions(
        temperature=0.5, top_p=0.4, top_k=3, min_p=0.1, repetition_penalty=1.1, seed=9
    )
    assert (ask.model, ask.max_tokens, ask.logprobs) == ("m", 5, 2)
    assert ask.response_format == ResponseFormat(FormatKind.JSON_SCHEMA, '{"type": "object"}')
    assert ask.rename("max_tokens") == "max_output_tokens"
    assert ask.rename("logprobs") == "top_logprobs"
    assert ask.rename("sampling.temperature") == "temperature"
    assert ask.rename("response_format.json_schema") == "text.format.schema"


def test_no_more_is_asked_than_is_said() -> None:
    """Defaults are the model's."""
    ask = ask_of(text={"format": {"type": "text"}})
    assert (ask.max_tokens, ask.logprobs, ask.response_format) == (None, None, None)
    assert ask.sampling == SamplingOptions()
    assert ask_of(include=[LOGPROBS]).logprobs == 0
    any_object = ask_of(text={"format": {"type": "json_object"}})
    assert any_object.response_format == ResponseFormat(FormatKind.JSON_OBJECT)


def test_instructions_come_before_what_was_said() -> None:
    """They are the system's message; then comes the history, then the input."""
    request = read(instructions="be brief", input=[{"role": "user", "content": "now"}])
    ask = ask_response(request, [Message("user", "before")])
    assert isinstance(ask.prompt, Chat)
    assert ask.prompt.messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "before"),
        ChatMessage("user", "now"),
    )
    assert ask.rename("chat.messages[0].content") == "instructions"
    assert ask.rename("chat.messages[1]") == "previous_response_id"
    assert ask.rename("chat.messages[2].content") == "input[0].content"
    assert ask_of().rename("chat.messages[0].content") == "input"
    assert ask_of().rename("chat.messages") == "input"


def test_a_call_that_is_wrong_has_its_items_name() -> None:
    """Though several items are one message on the wire."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    ask = ask_of(input=[{"role": "user", "content": "a"}, call, call])
    wire = "chat.messages[1].tool_calls[1].arguments_json"
    assert ask.rename(wire) == "input[2].arguments"


def test_what_is_wrong_has_its_items_name_though_rules_move_it() -> None:
    """Where a head was left out, and a reminder is the end of a call's answer, none counts on."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "o"}
    reminder = {"role": "user", "content": "<system-reminder>r</system-reminder>"}
    user = {"role": "user", "content": "u"}
    items = [user, call, result, reminder, user]
    ask = ask_of(instructions="x-anthropic-billing-header: a=b;", input=items).settle()
    assert isinstance(ask.prompt, Chat)
    roles = [message.role for message in ask.prompt.messages]
    assert roles == ["user", "assistant", "tool", "user"]
    assert ask.rename("chat.messages[0].content") == "input[0].content"
    assert ask.rename("chat.messages[1].tool_calls[0].id") == "input[1].call_id"
    assert ask.rename("chat.messages[1].tool_calls[0].arguments_json") == "input[1].arguments"
    assert ask.rename("chat.messages[2].content") == "input[2].output"
    assert ask.rename("chat.messages[3]") == "input[4]"
    assert ask_of().settle().rename("chat.messages[0].content") == "input"


def test_tools_and_who_decides_on_calls() -> None:
    """A tool is offered in a chat's form; each choice is one of the wire's."""
    wanted: list[tuple[object, ToolChoice, str]] = [
        (None, ToolChoice.AUTO, ""),
        ("auto", ToolChoice.AUTO, ""),
        ("none", ToolChoice.NONE, ""),
        ("required", ToolChoice.REQUIRED, ""),
        ({"type": "function", "name": "f"}, ToolChoice.REQUIRED, "f"),
    ]
    for sent, choice, name in wanted:
        chat = chat_of(tools=[TOOL], tool_choice=sent, parallel_tool_calls=False)
        assert (chat.tool_choice, chat.tool_name) == (choice, name)
        assert chat.parallel_tool_calls is False
    function = {key: TOOL[key] for key in ("name", "description", "parameters", "strict")}
    assert json.loads(chat.tools_json[0]) == {"type": "function", "function": function}
    bare = chat_of(tools=[{"type": "function", "name": "g", "parameters": None}])
    assert json.loads(bare.tools_json[0]) == {"type": "function", "function": {"name": "g"}}
    assert ask_of().rename("chat.tools_json[3]") == "tools[3]"


def test_variables_of_a_template() -> None:
    """An effort is one, and none is no thinking; the client's own come first."""
    assert chat_of().variables_json == ""
    none = json.loads(chat_of(reasoning={"effort": "none"}).variables_json)
    assert none == {"reasoning_effort": "none", "enable_thinking": False}
    own = chat_of(reasoning={"effort": "low"}, chat_template_kwargs={"reasoning_effort": "high"})
    assert json.loads(own.variables_json) == {"reasoning_effort": "high"}


def showing(image: dict[str, Any], role: str = "user") -> dict[str, Any]:
    """Return a message that shows an image."""
    return {"role": role, "content": [{"type": "input_image", **image}]}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("top_logprobs", {"top_logprobs": 2}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("metadata", {"metadata": {str(number): "" for number in range(17)}}),
    ("metadata.k", {"metadata": {"k": "v" * 513}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].type", {"tools": [{"type": "custom", "name": "f"}]}),
    ("tool_choice.type", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("input[0].type", {"input": [{"id": "i"}]}),
    ("input[0].type", {"input": [{"type": "web_search_call", "id": "w"}]}),
    ("input[0].content[0].image_url", {"input": [showing({"image_url": "x"})]}),
    ("input[0].content[0].image_url", {"input": [showing({"image_url": "https://x/y.png"})]}),
    ("input[0].content[0].image_url", {"input": [showing({})]}),
    ("input[0].content[0].file_id", {"input": [showing({"file_id": "f"})]}),
    ("input[0].content[0].type", {"input": [showing({"image_url": "x"}, "assistant")]}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("conversation", {"conversation": "conv_1"}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), REFUSED)
def test_what_cannot_be_honoured_is_refused(field: str, fields: dict[str, Any]) -> None:
    """By the name of the field."""
    with pytest.raises(BadField) as caught:
        ask_of(**fields)
    assert caught.value.failure.field == field


def test_an_image_is_named_as_the_request_names_it() -> None:
    """Of a message and of a function's output, whatever the wire calls it."""
    image = {"image_url": "data:image/png;base64,AA=="}
    output = [{"type": "input_image", **image}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    ask = ask_of(input=[showing(image), call, result])
    assert ask.rename("chat.messages[0].parts[0].image") == "input[0].content[0]"
    assert ask.rename("chat.messages[2].parts[0].image") == "input[2].output[0]"


def test_items_are_counted_with_those_before_them() -> None:
    """A conversation that has as many as there may be is not gone on from."""
    said = [Message("user", "")] * config.HTTP_ITEMS_MAX
    request = read(input=[{"role": "user", "content": ""}])
    assert ask_response(request, said[1:])
    with pytest.raises(BadField) as caught:
        ask_response(request, said)
    assert caught.value.failure.field == "input"


def test_what_asks_for_nothing_is_good() -> None:
    """Values that clients send though they want nothing by them."""
    ask = ask_of(
        background=False, truncation="disabled", include=["reasoning.encrypted_content"],
        text={"verbosity": "medium"}, reasoning={"context": "auto", "mode": "standard"},
        prompt_cache_key="k", service_tier="auto", store=True, top_logprobs=0,
    )  # fmt: skip
    assert ask.logprobs is None


def test_what_codex_always_sends_is_passed_over() -> None:
    """Its first request, but for tools and texts, asks for nothing but a conversation."""
    sent: dict[str, Any] = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": "01a20e36",
        "client_metadata": {"session_id": "01a20e36"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }

    assert ask_of(**sent).prompt == replace(chat_of(), parallel_tool_calls=True)
