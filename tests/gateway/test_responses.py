"""The Responses API with the official package, over a controller whose answers are scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from mlxd.v1 import inference_pb2
from mlxd_shared.domain.errors import InternalError, ModelNotFound, QueueFull
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.fakes.replies import model
from tests.support.gateways import Web, gateway_over
from tests.support.spoken import ARGUMENTS, CALL_ID, answer_with_call, answer_with_text

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": SCHEMA,
    "strict": True,
}
QUESTION = "How is the weather in Bern?"
TWO_TURNS = Answers(generate=answer_with_call(), generate_again=[answer_with_text()])
RESULT: Any = {"type": "function_call_output", "call_id": CALL_ID, "output": "rain"}
FIRST, SECOND = "mlxd-first-key", "mlxd-second-key"


def sdk(web: Web, key: str = "none") -> openai.AsyncOpenAI:
    """Return the official package's client."""
    return openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def over(answers: Answers) -> AsyncIterator[tuple[FakeServer, Web, openai.AsyncOpenAI]]:
    """Serve a gateway over scripted answers around the body."""
    async with serving(answers) as fake, gateway_over(fake.address) as web, sdk(web) as client:
        yield fake, web, client


def chats(fake: FakeServer) -> list[inference_pb2.ChatPrompt]:
    """Return the conversations that have come."""
    return [r.chat for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]


def summarise(chat: inference_pb2.ChatPrompt) -> list[tuple[str, str, str, int]]:
    """Return role, content, reasoning and number of calls of each message."""
    return [(m.role, m.content, m.reasoning, len(m.tool_calls)) for m in chat.messages]


TOLD = [
    ("user", QUESTION, "", 0),
    ("assistant", "Let me see.", "hmm", 1),
    ("tool", "rain", "", 0),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("goes_on", [True, False])
async def test_tools_over_two_turns(goes_on: bool) -> None:
    """The second turn names the first response, or sends back all items: the chat is the same."""
    async with over(TWO_TURNS) as (fake, _, client):
        async with client.responses.stream(
            model="demo", input=QUESTION, tools=[TOOL], instructions="Be brief."
        ) as stream:
            first = await stream.get_final_response()
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output_text == "Let me see."
        call = first.output[2]
        assert call.type == "function_call"
        assert (call.call_id, call.arguments) == (CALL_ID, ARGUMENTS)
        assert first.usage is not None
        assert first.usage.input_tokens_details.cached_tokens == 2
        assert first.usage.output_tokens_details.reasoning_tokens == 2
        sent: list[Any] = [{"role": "user", "content": QUESTION}, *first.output, RESULT]
        second = await client.responses.create(
            model="demo",
            input=[RESULT] if goes_on else sent,
            tools=[TOOL],
            previous_response_id=first.id if goes_on else openai.omit,
        )
        assert (second.output_text, second.status) == ("It rains.", "completed")
        assert second.previous_response_id == (first.id if goes_on else None)
        before, after = chats(fake)
        assert summarise(before) == [("system", "Be brief.", "", 0), TOLD[0]]
        assert summarise(after) == TOLD
        assert after.messages[1].tool_calls[0].id == CALL_ID
        assert after.messages[2].tool_call_id == CALL_ID
        function = {key: TOOL[key] for key in ("name", "description", "parameters", "strict")}
        assert json.loads(after.tools_json[0]) == {"type": "function", "function": function}


@pytest.mark.asyncio
async def test_streamed_and_not_are_the_same() -> None:
    """But for their ids; what came back of the request is in both."""
    wanted: dict[str, Any] = {
        "model": "demo", "input": QUESTION, "metadata": {"a": "b"}, "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"},
        "reasoning": {"effort": "low", "summary": "auto"},
    }  # fmt: skip
    async with over(Answers(generate=answer_with_call())) as (_, web, client):
        whole = (await web.post("/v1/responses", wanted)).json()
        async with client.responses.stream(**wanted) as stream:
            events = [event async for event in stream]
        assert events[0].type == "response.created"
        streamed = (await web.http.get(f"/v1/responses/{events[0].response.id}")).json()
    assert (whole["metadata"], whole["temperature"]) == ({"a": "b"}, 0.5)
    assert (whole["tools"], whole["tool_choice"]) == ([TOOL], wanted["tool_choice"])
    assert whole["text"]["format"] == wanted["text"]["format"]
    assert whole["reasoning"] == wanted["reasoning"]
    assert whole["output"][0]["summary"] == [{"type": "summary_text", "text": "hmm"}]
    for response in (whole, streamed):
        del response["id"], response["created_at"]
        for item in response["output"]:
            del item["id"]
    assert whole == streamed
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))


@pytest.mark.asyncio
async def test_what_is_kept_can_be_read_and_deleted() -> None:
    """A response and its input; then nothing can go on from it, nor from what follows it."""
    async with over(Answers(generate=answer_with_text())) as (_, _, client):
        first = await client.responses.create(model="demo", input="a")
        then = await client.responses.create(
            model="demo",
            input=[{"role": "user", "content": text} for text in "bcd"],
            previous_response_id=first.id,
        )
        assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
        items = [item async for item in client.responses.input_items.list(then.id, limit=1)]
        assert [item.to_dict()["content"] for item in items] == [
            [{"type": "input_text", "text": text}] for text in "dcb"
        ]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.retrieve(first.id)
        assert missing.value.param == "response_id"
        assert (await client.responses.retrieve(then.id)).id == then.id
        for gone in (first.id, then.id, "resp_x"):
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(model="demo", input="c", previous_response_id=gone)
            assert caught.value.param == "previous_response_id"


@pytest.mark.asyncio
async def test_what_is_not_to_be_kept_is_not() -> None:
    """Nor is what failed."""
    lost: Sequence[Any] = [*answer_with_text()[:1], InternalError("e-1")]
    answers = Answers(generate=answer_with_text(), generate_again=[lost])
    async with over(answers) as (_, _, client):
        unkept = await client.responses.create(model="demo", input="a", store=False)
        async with client.responses.stream(model="demo", input="a") as stream:
            *_, last = [event async for event in stream]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        for response_id in (unkept.id, last.response.id):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response_id)


@pytest.mark.asyncio
async def test_a_key_sees_its_own_responses_alone() -> None:
    """To another it is as if they were not there, whatever it asks."""
    answers = Answers(generate=answer_with_text(), models=[model()])
    async with (
        serving(answers) as fake,
        gateway_over(fake.address, passes_keys=True) as web,
        sdk(web, FIRST) as owner,
        sdk(web, SECOND) as other,
    ):
        made = await owner.responses.create(model="demo", input="a")
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            _ = [item async for item in other.responses.input_items.list(made.id)]
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="demo", input="b", previous_response_id=made.id)
        assert (await owner.responses.retrieve(made.id)).id == made.id
        same = await web.http.get(
            f"/v1/responses/{made.id}", headers={"x-api-key": FIRST, "Authorization": "other"}
        )
        assert same.status_code == 200
        assert FIRST not in same.text


@pytest.mark.asyncio
async def test_errors_have_the_packages_own_classes() -> None:
    """Those of a request, of a model, and of what is not served."""
    cases: list[tuple[type[openai.APIStatusError], str | None, dict[str, Any]]] = [
        (openai.BadRequestError, "background", {"background": True}),
        (openai.BadRequestError, "tools[0].type", {"tools": [{"type": "web_search"}]}),
        (openai.BadRequestError, "input[0].role", {"input": [{"role": "king", "content": ""}]}),
        (openai.BadRequestError, "temprature", {"extra_body": {"temprature": 1}}),
    ]
    async with over(Answers(generate=answer_with_text())) as (fake, _, client):
        for kind, field, fields in cases:
            with pytest.raises(kind) as caught:
                await client.responses.create(**{"model": "demo", "input": "a", **fields})
            assert caught.value.param == field
        with pytest.raises(openai.BadRequestError) as cancelled:
            await client.responses.cancel("resp_x")
        assert cancelled.value.param == "background"
        with pytest.raises(openai.BadRequestError) as streamed:
            await client.responses.retrieve("resp_x", stream=True)
        assert streamed.value.param == "stream"
        assert chats(fake) == []
    for error, expected in [
        (ModelNotFound("demo"), openai.NotFoundError),
        (QueueFull("streams", 4, retry_after_s=2.5), openai.RateLimitError),
    ]:
        async with over(Answers(generate=[error])) as (_, _, client):
            with pytest.raises(expected):
                await client.responses.create(model="demo", input="a", stream=True)


@pytest.mark.asyncio
async def test_a_client_that_goes_ends_its_response() -> None:
    """In the middle of a stream; nothing of it is kept."""
    answers = Answers(generate=answer_with_call()[:2], hold=True)
    async with over(answers) as (fake, _, client):
        async with client.responses.stream(model="demo", input="a") as stream:
            created = await anext(stream)
            assert created.type == "response.created"
        await fake.left.wait()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(created.response.id)
