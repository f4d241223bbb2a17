"""SMG 1.13, from its wheel, in front of a controller: each of its APIs, as its clients ask."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlxd import Client
from tests.support.cli import LIMIT_S
from tests.support.served import Served
from tests.support.smg import Routed, serve_door, smg_over

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
ASK = {"model": "demo", "messages": STORY, "max_tokens": 24, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "pet", "parameters": SCHEMA}}]
PENALTIES = (1.0, 0.5, 1.5, 0.75, 1.25, 2.0)
"""The demo model knows no JSON: without one it goes on with blanks, with some with more members."""


@pytest_asyncio.fixture(name="served", loop_scope="module", scope="module")
async def made_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Served, Path]]:
    """A controller of the demo model, with a door for routers."""
    manifest = tmp_path_factory.mktemp("door") / "manifest.json"
    async with serve_door(manifest, "--preload", "demo") as served:
        yield served, manifest


@pytest_asyncio.fixture(name="smg", loop_scope="module", scope="module")
async def made_router(
    served: tuple[Served, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Routed]:
    """SMG in front of it, which has found the model by the file."""
    log_path = tmp_path_factory.mktemp("smg") / "log"
    async with smg_over(served[1], workers=1, log_path=log_path) as smg:
        yield smg


def text_of(events: Sequence[Any], choice: int = 0) -> str:
    """Return the text of a streamed choice."""
    pieces = [each for event in events for each in event["choices"] if each["index"] == choice]
    return "".join(piece["delta"].get("content") or "" for piece in pieces)


def ends_of(events: Sequence[Any]) -> dict[int, str]:
    """Return why each streamed choice ended."""
    pieces = [each for event in events for each in event["choices"]]
    return {each["index"]: each["finish_reason"] for each in pieces if each["finish_reason"]}


async def test_the_model_is_found_by_its_name(smg: Routed, served: tuple[Served, Path]) -> None:
    """With its limits, and its tokenizer, which is on no path that SMG could read."""
    (worker,) = (await smg.http.get("/workers")).json()["workers"]
    (tokenizer,) = (await smg.http.get("/v1/tokenizers")).json()["tokenizers"]
    async with Client(served[0].address, timeout_s=LIMIT_S) as client:
        digest = (await client.model("demo")).digest

    assert (worker["model_id"], worker["runtime_type"]) == ("demo", "vllm")
    assert worker["models"][0]["context_length"] == 1024
    assert tokenizer["source"] == f"/mlxd/{digest}"
    missing = await smg.http.post(CHAT, json={**ASK, "model": "nobody"})
    assert missing.status_code == 404


async def test_a_chat_is_the_same_streamed_and_whole(smg: Routed) -> None:
    """Greedy: equal texts and counts."""
    whole = await smg.post(CHAT, ASK)
    events = await smg.events(CHAT, {**ASK, "stream_options": {"include_usage": True}})
    choice = whole["choices"][0]

    assert choice["message"]["content"] == text_of(events) != ""
    assert ends_of(events) == {0: choice["finish_reason"]} == {0: "length"}
    counts = [each["usage"] for each in (whole, events[-1])]
    assert [count["completion_tokens"] for count in counts] == [24, 24]
    assert counts[0]["prompt_tokens"] == counts[1]["prompt_tokens"] > 0


async def test_three_choices_are_the_same_streamed_and_whole(smg: Routed) -> None:
    """Each by a seed of its own, so that they differ."""
    ask = {**ASK, "n": 3, "temperature": 1.0, "seed": 3}
    whole = await smg.post(CHAT, ask)
    events = await smg.events(CHAT, ask)
    choices = sorted(whole["choices"], key=lambda choice: choice["index"])  # as they end
    texts = [choice["message"]["content"] for choice in choices]

    assert [text_of(events, choice) for choice in range(3)] == texts
    assert len(set(texts)) == 3
    assert sorted(ends_of(events)) == [0, 1, 2]


async def test_a_stop_string_ends_the_text_before_it(smg: Routed) -> None:
    """The row ends with it, too: no tokens are generated for nothing."""
    text = (await smg.post(CHAT, ASK))["choices"][0]["message"]["content"]
    stop = text.split()[3]
    stopped = await smg.post(CHAT, {**ASK, "stop": [stop]})
    choice = stopped["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text.partition(stop)[0]
    assert stopped["usage"]["completion_tokens"] < 24


async def test_logprobs_come_with_every_token(smg: Routed) -> None:
    """With the best beside it, whole and streamed."""
    ask = {**ASK, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    whole = (await smg.post(CHAT, ask))["choices"][0]["logprobs"]["content"]
    events = await smg.events(CHAT, ask)
    parts = [each.get("logprobs") or {} for event in events for each in event["choices"]]
    streamed = [token for each in parts for token in each.get("content") or ()]

    assert [each["token"] for each in whole] == [each["token"] for each in streamed]
    assert len(whole) == 8
    assert all(len(each["top_logprobs"]) == 2 for each in (*whole, *streamed))
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in whole)


async def test_a_schema_holds_the_answer(smg: Routed) -> None:
    """Whoever the model is."""
    held = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}
    ask = {**ASK, "response_format": held, "frequency_penalty": 1.0, "max_tokens": 200}
    choice = (await smg.post(CHAT, ask))["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["size"] in (1, 2)


async def test_a_required_tool_is_called(smg: Routed) -> None:
    """With arguments by its schema; whole and streamed."""
    for penalty in PENALTIES:
        ask = {
            **ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200,
            "frequency_penalty": penalty,
        }  # fmt: skip
        choice = (await smg.post(CHAT, ask))["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            break
    else:
        pytest.fail("no answer came to its end")
    events = await smg.events(CHAT, ask)
    pieces = [
        call["function"].get("arguments") or ""
        for event in events
        for each in event["choices"]
        for call in each["delta"].get("tool_calls") or ()
    ]

    calls = choice["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"pet"}
    assert all(json.loads(call["function"]["arguments"])["size"] in (1, 2) for call in calls)
    assert '"size"' in "".join(pieces)
    assert ends_of(events) == {0: "tool_calls"}


async def test_messages_are_answered_and_a_tool_can_be_forced(smg: Routed) -> None:
    """The API of Anthropic, whole and streamed."""
    ask = {"model": "demo", "max_tokens": 12, "temperature": 0, "messages": STORY}
    whole = await smg.post("/v1/messages", ask)
    events = await smg.events("/v1/messages", ask)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    tool = {"name": "pet", "description": "x", "input_schema": SCHEMA}
    forced = {
        **ASK, "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "tool", "name": "pet"},
    }  # fmt: skip
    called = (await smg.post("/v1/messages", forced))["content"]

    assert whole["content"][0]["text"] == "".join(delta["text"] for delta in deltas) != ""
    assert whole["usage"]["output_tokens"] == 12
    assert [each["name"] for each in called if each["type"] == "tool_use"] == ["pet"]


async def test_a_completion_is_that_of_the_controller(
    smg: Routed, served: tuple[Served, Path]
) -> None:
    """SMG's tokens are mlxd's own, but for those that begin a prompt, which it leaves out here."""
    ask = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    answer = await smg.post("/v1/completions", {**ask, "top_k": -1, "top_p": 1.0})
    async with Client(served[0].address, timeout_s=LIMIT_S) as client:
        own = await client.tokenize("Once upon a time", model="demo", add_special_tokens=False)

    assert answer["usage"]["prompt_tokens"] == len(own)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["text"]


async def test_a_vector_is_that_of_the_controller(smg: Routed, served: tuple[Served, Path]) -> None:
    """To the last bit that a float of 32 has."""
    answer = await smg.post("/v1/embeddings", {"model": "demo", "input": "Once upon a time"})
    async with Client(served[0].address, timeout_s=LIMIT_S) as client:
        (own,) = await client.embed(["Once upon a time"], model="demo")

    assert answer["data"][0]["embedding"] == pytest.approx(own, rel=1e-6)


async def test_a_client_that_leaves_frees_its_row(smg: Routed, served: tuple[Served, Path]) -> None:
    """A gentle unload waits for streams: that it completes in time shows that none is left."""
    ask = {**ASK, "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with smg.http.stream("POST", CHAT, json=ask) as answer:
        lines = answer.aiter_lines()
        assert [await anext(lines) for _ in range(3)]
    async with Client(served[0].address, timeout_s=LIMIT_S) as client:
        await client.unload("demo", grace_s=3600)
        figures = (await client.status()).metrics
    ended = [
        point.labels
        for family in figures
        if family.name == "mlxd_requests_total"
        for point in family.points
    ]

    assert any(labels.get("code") == "CANCELLED" for labels in ended), ended
