"""Anthropic's requests in mlxd's words: blocks, tools' answers in their place, and their fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mlxd import Chat, ChatMessage, FormatKind, ResponseFormat, ToolCall, ToolChoice
from mlxd_gateway.anthropic import requests as r
from mlxd_gateway.anthropic.asks import ask_count, ask_message
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import refuse


def ask_of(**fields: Any) -> Ask:
    """Return what a request with these fields asks."""
    body = {"model": "m", "max_tokens": 5, "messages": [], **fields}
    return ask_message(msgspec.json.decode(json.dumps(body), type=r.MessageRequest))


def chat_of(**fields: Any) -> Chat:
    """Return the conversation of that request."""
    prompt = ask_of(**fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}]},
        {"type": "text", "text": "go on"},
    ]},
    {"role": "system", "content": "be brief"},
]  # fmt: skip


def test_blocks_become_messages_in_their_order() -> None:
    """Each tool's answer is a message of its own; a system message keeps its place."""
    ask = ask_of(messages=MESSAGES, system=[{"type": "text", "text": "s"}])
    assert isinstance(ask.prompt, Chat)
    calls = (ToolCall("f", '{"a": 1}', "t1"), ToolCall("g", "{}", "t2"))
    assert ask.prompt.messages == (
        ChatMessage("system", "s"),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "ok", "hm", calls),
        ChatMessage("tool", "one", tool_call_id="t1"),
        ChatMessage("tool", "two", tool_call_id="t2"),
        ChatMessage("user", "go on"),
        ChatMessage("system", "be brief"),
    )
    assert ask.rename("chat.messages[0]") == "system"
    assert ask.rename("chat.messages[4].tool_call_id") == "messages[2].content[1].tool_call_id"
    assert ask.rename("chat.messages[6].content") == "messages[3].content"


def test_tools_are_offered_as_functions() -> None:
    """Without what concerns the API alone."""
    tool = {
        "name": "f", "description": "d", "input_schema": {"type": "object"},
        "cache_control": {"type": "ephemeral"}, "type": "custom",
    }  # fmt: skip
    (offered,) = chat_of(tools=[tool]).tools_json
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert json.loads(offered) == {"type": "function", "function": function}
    (strict,) = chat_of(tools=[{**tool, "strict": True}]).tools_json
    assert json.loads(strict)["function"] == {**function, "strict": True}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "a", "max_uses": 1}]}),
        ("tools[0].type", {"tools": [{"type": "computer_toolset_20260801", "configs": {}}]}),
        ("tools[0].max_uses", {"tools": [{"name": "a", "max_uses": 1}]}),
        ("thinking.type", {"thinking": {"type": "between_tools"}}),
        (
            "messages[0].content[1].type",
            {"messages": [{"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "search_result", "title": "b"}]}]},
        ),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}]}]},
        ),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]},
        ),
        (
            "messages[0].content[0].content[0].type",
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [
                    {"type": "tool_reference", "tool_name": "b"}]}]}]},
        ),
    ],
)  # fmt: skip
def test_what_runs_with_anthropic_is_refused_by_its_type(
    field: str, fields: dict[str, object]
) -> None:
    """Types of tools, blocks and thinking that are served elsewhere, whatever else is there."""
    body = {"model": "m", "max_tokens": 1, "messages": MESSAGES, **fields}
    with pytest.raises(BadField) as caught:
        refuse(msgspec.json.decode(json.dumps(body), type=r.MessageRequest))

    assert caught.value.failure.field == field


def test_a_tool_of_the_client_s_has_a_name() -> None:
    """One without is named by its place."""
    with pytest.raises(BadField) as caught:
        chat_of(tools=[{"name": "f"}, {"description": "d"}])

    assert caught.value.failure.field == "tools[1].name"


def test_who_decides_on_calls() -> None:
    """Each choice is one of the wire's; one call at a time is said the other way round."""
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    wanted = {
        "auto": (ToolChoice.AUTO, ""),
        "none": (ToolChoice.NONE, ""),
        "any": (ToolChoice.REQUIRED, ""),
        "tool": (ToolChoice.REQUIRED, "f"),
    }
    for kind, (choice, name) in wanted.items():
        sent: dict[str, object] = {"type": kind, **({"name": "f"} if name else {})}
        chat = chat_of(tools=tools, tool_choice=sent)
        assert (chat.tool_choice, chat.tool_name) == (choice, name)
        assert chat.parallel_tool_calls is None
        sent["disable_parallel_tool_use"] = True
        assert chat_of(tools=tools, tool_choice=sent).parallel_tool_calls is False
    bad: list[dict[str, object]] = [
        {"type": "tool"}, {"type": "auto", "name": "f"}, {"type": "any", "name": "f"},
        {"type": "none", "name": ""},
    ]  # fmt: skip
    for sent in bad:
        with pytest.raises(BadField) as refused:
            chat_of(tools=tools, tool_choice=sent)
        assert refused.value.failure.field == "tool_choice.name"


def test_thinking_and_output() -> None:
    """Thinking and effort are variables of the template; a format is a schema."""
    assert chat_of().variables_json == ""
    assert chat_of(thinking={"type": "adaptive"}).variables_json == ""
    on = chat_of(thinking={"type": "enabled", "budget_tokens": 1024})
    assert json.loads(on.variables_json) == {"enable_thinking": True}
    off = chat_of(thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert json.loads(off.variables_json) == {"enable_thinking": False, "reasoning_effort": "low"}
    held = ask_of(output_config={"format": {"type": "json_schema", "schema": {"a": 1}}})
    assert held.response_format == ResponseFormat(FormatKind.JSON_SCHEMA, '{"a": 1}')


def test_a_count_asks_for_one_token_of_the_same_chat() -> None:
    """What is counted is what a message with these fields evaluates."""
    body = {"model": "m", "messages": MESSAGES}
    count = ask_count(msgspec.json.decode(json.dumps(body), type=r.CountRequest))
    assert (count.max_tokens, count.prompt) == (1, ask_of(messages=MESSAGES).prompt)
