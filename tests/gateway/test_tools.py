"""Tools over two turns with the official packages: what they get, and what they send back."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai
import pytest

from mlxd.v1 import inference_pb2
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.gateways import gateway_over
from tests.support.spoken import ARGUMENTS, CALL_ID, answer_with_call, answer_with_text

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
QUESTION = {"role": "user", "content": "How is the weather in Bern?"}
TWO_TURNS = Answers(generate=answer_with_call(), generate_again=[answer_with_text()])


def chats(fake: FakeServer) -> list[inference_pb2.ChatPrompt]:
    """Return the conversations that have come."""
    return [r.chat for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]


def check_turns(fake: FakeServer, *, call_id: str = CALL_ID) -> None:
    """Assert that the tool was offered, and that its call and its answer came back in order."""
    first, second = chats(fake)
    assert json.loads(first.tools_json[0]) == {"type": "function", "function": FUNCTION}
    question, answer, result = second.messages
    assert (question.role, question.content) == ("user", QUESTION["content"])
    assert (answer.role, answer.content) == ("assistant", "Let me see.")
    (call,) = answer.tool_calls
    assert (call.id, call.name, json.loads(call.arguments_json)) == (
        call_id, "weather", json.loads(ARGUMENTS),
    )  # fmt: skip
    assert (result.role, result.content) == ("tool", "rain")


@pytest.mark.asyncio
async def test_tools_with_openai() -> None:
    """The call streams in one delta with its id; the answer to it names that id."""
    tools: Any = [{"type": "function", "function": FUNCTION}]
    async with serving(TWO_TURNS) as fake, gateway_over(fake.address) as web:
        client = openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0)
        async with client:
            messages: list[Any] = [QUESTION]
            async with client.chat.completions.stream(
                model="demo", messages=messages, tools=tools
            ) as stream:
                done = await stream.get_final_completion()
            choice = done.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me see."
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert (call.id, call.function.arguments) == (CALL_ID, ARGUMENTS)
            messages.append(
                {
                    "role": "assistant",
                    "content": choice.message.content,
                    "reasoning_content": "hmm",
                    "tool_calls": [
                        {
                            "id": call.id,
                            "type": "function",
                            "function": {"name": call.function.name, "arguments": ARGUMENTS},
                        }
                    ],
                }
            )
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
            answer = await client.chat.completions.create(
                model="demo", messages=messages, tools=tools, tool_choice="auto"
            )
        assert answer.choices[0].message.content == "It rains."
        check_turns(fake)
        assert chats(fake)[1].messages[1].reasoning == "hmm"
        assert chats(fake)[1].messages[2].tool_call_id == CALL_ID


@pytest.mark.asyncio
async def test_reasoning_and_a_call_at_once_with_openai() -> None:
    """Not streamed: content, reasoning_content and tool_calls of one message."""
    async with serving(TWO_TURNS) as fake, gateway_over(fake.address) as web:
        body = {"model": "demo", "messages": [QUESTION]}
        answer = (await web.post("/v1/chat/completions", body)).json()
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"] == "hmm"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.asyncio
async def test_no_tool_is_offered_with_the_choice_none() -> None:
    """tool_choice none: the wire's own, by which the model does not learn of the tools."""
    body = {
        "model": "demo",
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "none",
    }
    async with serving(TWO_TURNS) as fake, gateway_over(fake.address) as web:
        assert (await web.post("/v1/chat/completions", body)).status_code == 200
        assert chats(fake)[0].tool_choice == inference_pb2.TOOL_CHOICE_NONE


@pytest.mark.asyncio
async def test_tools_with_anthropic() -> None:
    """Blocks of thinking, text and tool_use; the answer is a block of a user's message."""
    tools: Any = [
        {"name": "weather", "description": FUNCTION["description"], "input_schema": SCHEMA}
    ]
    async with serving(TWO_TURNS) as fake, gateway_over(fake.address) as web:
        client = anthropic.AsyncAnthropic(base_url=web.url, api_key="none", max_retries=0)
        async with client:
            messages: list[Any] = [QUESTION]
            async with client.messages.stream(
                model="demo", max_tokens=64, messages=messages, tools=tools
            ) as stream:
                done = await stream.get_final_message()
            assert [block.type for block in done.content] == ["thinking", "text", "tool_use"]
            thinking, text, call = done.content
            assert isinstance(thinking, anthropic.types.ThinkingBlock)
            assert isinstance(text, anthropic.types.TextBlock)
            assert isinstance(call, anthropic.types.ToolUseBlock)
            assert (thinking.thinking, text.text) == ("hmm", "Let me see.")
            assert (call.id, call.input) == (CALL_ID, json.loads(ARGUMENTS))
            assert done.stop_reason == "tool_use"
            assert (done.usage.input_tokens, done.usage.cache_read_input_tokens) == (3, 2)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
            messages.append({"role": "assistant", "content": done.content})
            messages.append({"role": "user", "content": [result]})
            answer = await client.messages.create(
                model="demo", max_tokens=64, messages=messages, tools=tools
            )
        assert isinstance(answer.content[0], anthropic.types.TextBlock)
        assert (answer.content[0].text, answer.stop_reason) == ("It rains.", "end_turn")
        check_turns(fake)
        assert chats(fake)[1].messages[1].reasoning == "hmm"


@pytest.mark.asyncio
async def test_tools_with_ollama() -> None:
    """Arguments are an object on both ways; the answer names the tool."""
    async with serving(TWO_TURNS) as fake, gateway_over(fake.address) as web:
        client = ollama.AsyncClient(host=web.url)
        tools: Any = [{"type": "function", "function": FUNCTION}]
        messages: list[Any] = [QUESTION]
        pieces = [
            piece async for piece in await client.chat("demo", messages, tools=tools, stream=True)
        ]
        calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
        assert [dict(call.function.arguments) for call in calls] == [json.loads(ARGUMENTS)]
        assert "".join(piece.message.thinking or "" for piece in pieces) == "hmm"
        content = "".join(piece.message.content or "" for piece in pieces)
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages.append({"role": "tool", "tool_name": "weather", "content": "rain"})
        answer = await client.chat("demo", messages, tools=tools)
        await client._client.aclose()
        assert answer.message.content == "It rains."
        check_turns(fake, call_id="")
        assert chats(fake)[1].messages[2].name == "weather"
