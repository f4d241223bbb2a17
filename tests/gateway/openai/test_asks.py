"""OpenAI's requests in mlxd's words, and what contradicts itself."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import pytest

from mlxd import (
    Chat,
    ChatMessage,
    FormatKind,
    ResponseFormat,
    SamplingOptions,
    ToolCall,
    ToolChoice,
)
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import refuse
from mlxd_gateway.openai import requests as r
from mlxd_gateway.openai.asks import ask_chat, ask_completions, chooses, texts_of
from mlxd_shared import config

T = TypeVar("T")
TEXT = {"type": "text", "text": "a"}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n"}}
USER = {"role": "user", "content": "hi"}


def chat_of(**fields: Any) -> Chat:
    """Return the conversation of a request with these fields."""
    prompt = ask_chat(read(r.ChatRequest, {"messages": [USER], **fields})).prompt
    assert isinstance(prompt, Chat)
    return prompt


def read(kind: type[T], body: object) -> T:
    """Return the request that a body spells."""
    return msgspec.json.decode(json.dumps(body), type=kind)


def test_every_sampling_field_is_passed_on() -> None:
    """Under mlxd's names; biases by token id."""
    body = {
        "messages": [USER], "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.1, "seed": 9,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "logit_bias": {"7": -1}, "max_completion_tokens": 5, "stop": "x", "logprobs": True,
        "top_logprobs": 2, "response_format": {"type": "json_object"},
    }  # fmt: skip
    ask = ask_chat(read(r.ChatRequest, body))
    assert ask.sampling == SamplingOptions(
        temperature=0.5, top_p=0.4, top_k=3, min_p=0.1, seed=9, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3, logit_bias=((7, -1.0),),
    )  # fmt: skip
    assert (ask.max_tokens, ask.stop, ask.logprobs) == (5, ("x",), 2)
    assert ask.response_format == ResponseFormat(FormatKind.JSON_OBJECT)
    assert ask.rename("max_tokens") == "max_completion_tokens"


def test_what_packages_add_to_an_answer_may_come_back() -> None:
    """Their readers' fields, and LiteLLM's, are passed over in a message that is sent again."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "parsed": None,
        "provider_specific_fields": {"refusal": None},
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    body = read(r.ChatRequest, {"messages": [USER, sent]})
    refuse(body)
    prompt = ask_chat(body).prompt

    assert isinstance(prompt, Chat)
    assert prompt.messages[1].tool_calls == (ToolCall("f", "{}", "a"),)


def test_who_decides_on_calls() -> None:
    """Each choice is one of the wire's, whose fields have the request's names."""
    wanted: list[tuple[object, ToolChoice, str]] = [
        (None, ToolChoice.AUTO, ""),
        ("auto", ToolChoice.AUTO, ""),
        ("none", ToolChoice.NONE, ""),
        ("required", ToolChoice.REQUIRED, ""),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice.REQUIRED, "f"),
    ]
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for sent, choice, name in wanted:
        chat = chat_of(tools=tools, tool_choice=sent, parallel_tool_calls=False)
        assert (chat.tool_choice, chat.tool_name) == (choice, name)
        assert chat.parallel_tool_calls is False
        assert json.loads(chat.tools_json[0])["function"]["strict"] is True
    assert chat_of().parallel_tool_calls is None
    ask = ask_chat(read(r.ChatRequest, {"messages": [USER]}))
    assert ask.rename("chat.tool_name") == "tool_choice.function.name"


@pytest.mark.parametrize("choice", [
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    {"type": "custom", "custom": {"name": "f"}},
])  # fmt: skip
def test_choices_of_other_kinds_are_refused_by_name(choice: dict[str, Any]) -> None:
    """Those that no model here could be held to."""
    with pytest.raises(BadField, match=r"tool_choice\."):
        refuse(read(r.ChatRequest, {"messages": [USER], "tool_choice": choice}))


def test_messages_keep_their_place_and_their_parts() -> None:
    """Parts are joined; reasoning and calls go with the assistant's message."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u", "name": "Ann"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert chat_of(messages=messages).messages == (
        ChatMessage("system", "a\nb"),
        ChatMessage("developer", "d"),
        ChatMessage("user", "u", name="Ann"),
        ChatMessage("assistant", "", "hm", (ToolCall("f", "{}", "c1"),)),
        ChatMessage("tool", "done", tool_call_id="c1"),
    )


def test_variables_of_a_template() -> None:
    """What a client names itself comes before what reasoning_effort means."""
    assert chat_of().variables_json == ""
    none = json.loads(chat_of(reasoning_effort="none").variables_json)
    assert none == {"reasoning_effort": "none", "enable_thinking": False}
    named = chat_of(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert json.loads(named.variables_json)["enable_thinking"] is True


def test_prompts_of_a_completion() -> None:
    """A text, or token ids, alone or in a list; each of several has its place as its name."""
    prompts: list[tuple[Any, list[Any]]] = [
        ("a", ["a"]), (["a"], ["a"]), ([1, 2], [(1, 2)]), ([[1, 2]], [(1, 2)]),
        (["a", "b", "a"], ["a", "b", "a"]), ([[1], [2, 3]], [(1,), (2, 3)]),
    ]  # fmt: skip
    for prompt, expected in prompts:
        asks = ask_completions(read(r.CompletionRequest, {"prompt": prompt}))
        assert [ask.prompt for ask in asks] == expected
        for index, ask in enumerate(asks):
            name = "prompt" if len(asks) == 1 else f"prompt[{index}]"
            assert {ask.rename(field) for field in ("text", "tokens", "tokens.ids")} == {name}


def test_the_best_of_several_are_compared() -> None:
    """So many are made, with log-probabilities; as many as are answered are as `n` has them."""
    cases: list[tuple[dict[str, Any], int | None, int | None, bool]] = [
        ({}, None, None, False),
        ({"n": 2}, 2, None, False),
        ({"n": 2, "best_of": 2}, 2, None, False),
        ({"best_of": 4}, 4, 0, True),
        ({"n": 2, "best_of": 4, "logprobs": 3}, 4, 3, True),
        ({"best_of": 1, "stream": True}, 1, None, False),
    ]
    for fields, made, logprobs, compares in cases:
        request = read(r.CompletionRequest, {"prompt": "a", **fields})
        (ask,) = ask_completions(request)
        assert (ask.n, ask.logprobs, chooses(request)) == (made, logprobs, compares), fields
        assert ask.rename("n") == ("best_of" if "best_of" in fields else "n")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "echo": True}, "echo"),
        ({"n": 2, "echo": True}, "echo"),
        ({"n": 17, "best_of": 17}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(fields: dict[str, Any], name: str) -> None:
    """By the name of the field."""
    with pytest.raises(BadField) as caught:
        ask_completions(read(r.CompletionRequest, {"prompt": "a", **fields}))
    assert caught.value.failure.field == name


REFUSED = [
    ("top_logprobs", {"messages": [USER], "top_logprobs": 2}),
    ("max_tokens", {"messages": [USER], "max_tokens": 1, "max_completion_tokens": 2}),
    ("logit_bias", {"messages": [USER], "logit_bias": {"x": 1}}),
    ("chat_template_kwargs", {"messages": [USER], "chat_template_kwargs": 1,
                              "reasoning_effort": "low"}),
    ("response_format.json_schema.schema",
     {"messages": [USER], "response_format": NO_SCHEMA}),
    ("stream_options", {"messages": [USER], "stream_options": {"include_usage": True}}),
    ("stream_options", {"messages": [USER], "stream_options": {}, "stream": False}),
    ("messages[0].reasoning",
     {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "body"), REFUSED)
def test_what_contradicts_itself_is_refused(field: str, body: dict[str, Any]) -> None:
    """By the name of the field."""
    with pytest.raises(BadField) as caught:
        ask_chat(read(r.ChatRequest, body))
    assert caught.value.failure.field == field


MANY = ["a"] * (config.COMPLETION_PROMPTS_MAX + 1)


@pytest.mark.parametrize("prompt", [None, [], [1, "a"], ["a", 1], ["a", [1]], [[1], 1], MANY])
def test_other_prompts_are_refused(prompt: Any) -> None:
    """None, too many, and mixtures."""
    with pytest.raises(BadField) as caught:
        ask_completions(read(r.CompletionRequest, {"prompt": prompt}))
    assert caught.value.failure.field == "prompt"


def test_tokens_are_no_texts_to_embed() -> None:
    """Texts alone are turned into vectors."""
    assert texts_of(read(r.EmbeddingRequest, {"input": ["a", "b"]})) == ("a", "b")
    with pytest.raises(BadField):
        texts_of(read(r.EmbeddingRequest, {"input": [1, 2]}))
