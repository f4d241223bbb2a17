"""The official packages over a real gateway, controller and worker, on the built-in model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from mlxd import Client
from tests.support.chat_template import DEMO, write_bare_demo, write_template
from tests.support.gateways import Web, serve_web
from tests.support.served import Served

HI: list[Any] = [{"role": "user", "content": "Once upon a time"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}
ENDLESS = 900
"""Tokens that nobody waits for."""


@pytest.fixture(name="models", scope="module")
def write_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options for the built-in model, without a chat's template and with another's."""
    below = tmp_path_factory.mktemp("models")
    chatty = write_template(Path(shutil.copytree(DEMO, below / "chatty")))
    return ("--model", f"demo={write_bare_demo(below / 'bare')}", "--model", f"chatty={chatty}")


def address_of(web: Web) -> str:
    """Return the controller's address."""
    assert isinstance(web.served, Served)
    return web.served.address


@pytest.mark.asyncio
async def test_openai(models: tuple[str, ...]) -> None:
    """Models, completions and chats, streamed and not, with log-probabilities; embeddings.

    The first stream finds its model unloaded: it waits, and says so in comments.
    """
    async with (
        serve_web(*models) as web,
        openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["chatty", "demo"]
        assert (await client.models.retrieve("demo:latest")).id == "demo:latest"

        body = {"model": "demo", "prompt": "Once", "max_tokens": 3, "stream": True}
        first = await web.post("/v1/completions", body)
        assert first.text.endswith("data: [DONE]\n\n")

        common: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 12}
        done = await client.completions.create(
            model="demo", prompt="Once upon", logprobs=2, **common
        )
        pieces = await client.completions.create(
            model="demo", prompt="Once upon", stream=True, **common
        )
        text = "".join([piece.choices[0].text async for piece in pieces])
        assert text == done.choices[0].text != ""
        logprobs = done.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens).strip() == text.strip()
        assert done.choices[0].finish_reason == "length"
        assert done.usage is not None
        assert done.usage.completion_tokens == 12

        chat = await client.chat.completions.create(
            model="chatty", messages=HI, logprobs=True, top_logprobs=1, **common
        )
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="chatty", messages=HI, stream=True,
                stream_options={"include_usage": True}, **common,
            )
        ]  # fmt: skip
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert streamed == chat.choices[0].message.content
        assert chat.choices[0].logprobs is not None
        assert len(chat.choices[0].logprobs.content or ()) == 12
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12

        stopped = await client.completions.create(
            model="demo", prompt="Once upon a time", temperature=0, max_tokens=40, stop=["."]
        )
        assert (stopped.choices[0].finish_reason, "." in stopped.choices[0].text) == ("stop", False)

        format_: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        held = await client.chat.completions.create(
            model="chatty", messages=HI, response_format=format_, seed=1
        )
        assert set(json.loads(held.choices[0].message.content or "")) == {"name"}

        floats = await client.embeddings.create(
            model="demo", input=["a king", "a queen"], encoding_format="float"
        )
        packed = await client.embeddings.create(model="demo", input=["a king", "a queen"])
        # Read together, texts differ by rounding from one time to another.
        assert packed.data[1].embedding == pytest.approx(floats.data[1].embedding, abs=1e-5)
        assert packed.usage.prompt_tokens > 0


@pytest.mark.asyncio
async def test_openai_has_several_prompts_and_the_best_of_choices(models: tuple[str, ...]) -> None:
    """Choices follow the prompts; the usage counts all that were made."""
    async with (
        serve_web(*models) as web,
        openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as client,
    ):
        common: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 12}
        several = await client.completions.create(
            model="demo", prompt=["Once upon", "The king"], n=2, **common
        )
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        alone = await client.completions.create(model="demo", prompt="Once upon", **common)
        assert several.choices[0].text == alone.choices[0].text
        assert several.usage is not None
        assert 12 < several.usage.completion_tokens <= 4 * 12
        best = await client.completions.create(
            model="demo", prompt="Once upon", best_of=3, logprobs=0, **common
        )
        assert best.usage is not None
        assert len(best.choices) == 1
        assert 12 < best.usage.completion_tokens <= 3 * 12


@pytest.mark.asyncio
async def test_openai_is_told_what_is_wrong(models: tuple[str, ...]) -> None:
    """Errors are the package's own classes, with the field; so are those of a stream."""
    async with (
        serve_web(*models) as web,
        openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="none", messages=HI)
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.BadRequestError) as hot:
            await client.chat.completions.create(model="chatty", messages=HI, temperature=200)
        assert hot.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as many:
            await client.chat.completions.create(model="chatty", messages=HI, n=200)
        assert many.value.param == "n"
        with pytest.raises(openai.BadRequestError) as mute:
            await client.chat.completions.create(model="demo", messages=HI)
        assert mute.value.param == "messages"


@pytest.mark.asyncio
async def test_the_built_in_model_answers() -> None:
    """The SDK's first chat, with the model that is always there: streamed and not, it stops."""
    greeting: list[Any] = [{"role": "user", "content": "Hello!"}]
    async with (
        serve_web("--model", f"demo={DEMO}") as web,
        openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as client,
    ):
        question: Any = {"model": "demo", "messages": greeting, "temperature": 0}
        whole = await client.chat.completions.create(**question)
        reasons = [
            chunk.choices[0].finish_reason
            async for chunk in await client.chat.completions.create(**question, stream=True)
            if chunk.choices
        ]

    assert whole.choices[0].finish_reason == reasons[-1] == "stop"
    assert whole.choices[0].message.content


@pytest.mark.asyncio
async def test_anthropic(models: tuple[str, ...]) -> None:
    """Messages, streamed and not, stopped by a text; tokens counted; models; errors."""
    async with (
        serve_web(*models) as web,
        anthropic.AsyncAnthropic(base_url=web.url, api_key="none", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list(limit=1)] == ["chatty", "demo"]
        system = [{"type": "text", "text": "Tell a story."}]
        common: dict[str, Any] = {
            "model": "chatty", "messages": HI, "system": system, "max_tokens": 12,
            "extra_body": {"temperature": 0},
        }  # fmt: skip
        whole = await client.messages.create(**common)
        async with client.messages.stream(**common) as stream:
            streamed = await stream.get_final_message()
        assert [block.type for block in whole.content] == ["text"]
        assert streamed.content[0].to_dict()["text"] == whole.content[0].to_dict()["text"]
        assert streamed.stop_reason == whole.stop_reason == "max_tokens"
        counted = await client.messages.count_tokens(
            model="chatty", messages=HI, system="Tell a story."
        )
        usage = whole.usage
        prompt_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert counted.input_tokens == prompt_tokens
        assert isinstance(whole.content[0], anthropic.types.TextBlock)
        word = whole.content[0].text.split()[1]
        stopped = await client.messages.create(**common, stop_sequences=[word])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
        with pytest.raises(anthropic.BadRequestError) as forced:
            await client.messages.create(
                **common,
                tools=[{"name": "f", "input_schema": {"type": "object"}}],
                tool_choice={"type": "tool", "name": "g"},
            )
        assert "tool_choice.name" in str(forced.value)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**common, "model": "none"})


@pytest.mark.asyncio
async def test_ollama(models: tuple[str, ...]) -> None:
    """Chat, generate, embed, tags, ps and show; keep_alive loads and unloads."""
    async with serve_web(*models) as web:
        client = ollama.AsyncClient(host=web.url)
        assert [model.model for model in (await client.list()).models] == ["chatty", "demo"]
        assert (await client.generate("demo:latest")).done_reason == "load"
        (loaded,) = (await client.ps()).models
        assert (loaded.model, loaded.context_length) == ("demo", 1024)
        options: Any = {"temperature": 0, "num_predict": 8, "num_ctx": 4096}
        whole = await client.generate("demo", "Once upon a time", options=options)
        pieces = [
            piece
            async for piece in await client.generate(
                "demo", "Once upon a time", options=options, stream=True
            )
        ]
        assert "".join(piece.response or "" for piece in pieces) == whole.response != ""
        assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("length", 8)
        chat = await client.chat("chatty", HI, options=options, format=SCHEMA)
        assert chat.message.content
        assert chat.message.content.startswith("{")
        made = await client.embed("demo", ["a king", "a queen"])
        assert len(made.embeddings) == 2
        assert (await client.show("demo")).details is not None
        assert (await client.generate("demo", keep_alive=0)).done_reason == "unload"
        assert [model.model for model in (await client.ps()).models] == ["chatty"]
        with pytest.raises(ollama.ResponseError) as wrong:
            await client.generate("demo", "a", options={"mirostat": 1})
        assert "options.mirostat" in wrong.value.error
        await client._client.aclose()


@pytest.mark.asyncio
async def test_documents_are_ranked(models: tuple[str, ...], tmp_path: Path) -> None:
    """By a chat's answers, by vectors where the model has a pooling, and by nothing else."""
    pooled = tmp_path / "pooled"
    shutil.copytree(DEMO, pooled)
    (pooled / "1_Pooling").mkdir()
    (pooled / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    body = {"query": "the king", "documents": ["a boat", {"text": "the king"}], "top_n": 2}
    async with serve_web(*models, "--model", f"pooled={pooled}") as web:
        for model in ("chatty", "pooled"):
            answer = (await web.post("/v1/rerank", {"model": model, **body})).json()
            relevances = [each["relevance_score"] for each in answer["results"]]
            assert sorted(relevances, reverse=True) == relevances
            assert {each["index"] for each in answer["results"]} == {0, 1}
            assert answer["usage"]["total_tokens"] > 0
        assert (answer["results"][0]["index"], relevances[0]) == (1, pytest.approx(1, abs=1e-4))
        status, error = await web.error("/v2/rerank", {"model": "demo", **body})
        assert (status, error["message"][:7]) == (400, "model: ")
        long = {**body, "documents": ["a", "b " * 5000]}
        for model in ("chatty", "pooled"):
            status, error = await web.error("/v2/rerank", {"model": model, **long})
            assert (status, error["message"][:13]) == (400, "documents[1]:")


@pytest.mark.asyncio
@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_goes_frees_its_row(models: tuple[str, ...], streams: bool) -> None:
    """Streamed to or not: the worker has no stream left, without another request."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": ENDLESS, "stream": streams}
    async with serve_web(*models) as web, Client(address_of(web)) as client:
        async with client.load("demo") as updates:
            assert [update async for update in updates]
        if streams:
            async with web.http.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_raw())
        else:
            await go_early(web, body)
        async with client.watch_status(interval_s=0.1) as watch:
            async for status in watch:
                if not any(worker.streams_running for worker in status.workers):
                    break


async def go_early(web: Web, body: dict[str, Any]) -> None:
    """Send a request, and close the connection once the worker is at it."""
    host, port = web.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    async with Client(address_of(web)) as client, client.watch_status(interval_s=0.1) as watch:
        async for status in watch:
            if any(worker.streams_running for worker in status.workers):
                break
    writer.close()
    await writer.wait_closed()
