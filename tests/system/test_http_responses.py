"""The Responses API by the official package, over a real gateway, controller and worker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxd import Client
from tests.support.chat_template import DEMO, TEMPLATE, write_bare_demo, write_template
from tests.support.cli import mlxd
from tests.support.gateways import Web, serve_web
from tests.support.served import Served

ENDLESS = 900
"""Tokens that nobody waits for."""
LOOKS = 10_000
"""Requests, within which a server has looked at its keys again."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(name="models", scope="module")
def write_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options for the built-in model, without a template and with that of one that calls at once.

    With thoughts before the call the model would think for ever.
    """
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(DEMO, folder)
    write_template(folder, TEMPLATE.replace("<think> and ", ""))
    bare = write_bare_demo(folder.parent / "bare")
    return ("--model", f"demo={bare}", "--model", f"chatty={folder}")


def sdk(web: Web, key: str = "none") -> openai.AsyncOpenAI:
    """Return the official package's client."""
    return openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key=key, max_retries=0)


@pytest.mark.asyncio
async def test_responses(models: tuple[str, ...]) -> None:
    """Streamed and not, with log-probabilities; held to a schema; cut by their length."""
    common: dict[str, Any] = {
        "model": "chatty", "input": "Once upon a time", "temperature": 0, "max_output_tokens": 12,
    }  # fmt: skip
    async with serve_web(*models) as web, sdk(web) as client:
        pieces = [
            event.delta
            async for event in await client.responses.create(**common, stream=True)
            if event.type == "response.output_text.delta"
        ]
        whole = await client.responses.create(
            **common, include=["message.output_text.logprobs"], top_logprobs=1
        )
        assert "".join(pieces) == whole.output_text != ""
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None
        assert whole.usage.output_tokens == 12
        (said,) = whole.output
        assert said.type == "message"
        assert said.content[0].type == "output_text"
        assert len(said.content[0].logprobs or ()) == 12
        assert (await client.responses.retrieve(whole.id)).to_dict() == whole.to_dict()

        format_: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA}
        held = await client.responses.create(
            model="chatty", input="Once", text={"format": format_}, temperature=0
        )
        assert set(json.loads(held.output_text)) == {"city"}


@pytest.mark.asyncio
async def test_a_call_and_its_result(models: tuple[str, ...]) -> None:
    """The second turn reads the same by the first response's id as with all items sent again."""
    async with serve_web(*models) as web, sdk(web) as client:
        async with client.responses.stream(
            model="chatty", input="How is the weather?", tools=[TOOL], tool_choice="required",
            parallel_tool_calls=False, temperature=0,
        ) as stream:  # fmt: skip
            first = await stream.get_final_response()
        call = first.output[-1]
        assert call.type == "function_call"
        assert set(json.loads(call.arguments)) == {"city"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        common: dict[str, Any] = {
            "model": "chatty", "tools": [TOOL], "tool_choice": "none", "temperature": 0,
            "max_output_tokens": 8,
        }  # fmt: skip
        by_id = await client.responses.create(
            input=[result], previous_response_id=first.id, **common
        )
        question = {"role": "user", "content": "How is the weather?"}
        sent: list[Any] = [question, *first.output, result]
        by_items = await client.responses.create(input=sent, **common)
        assert by_id.usage is not None
        assert by_items.usage is not None
        assert by_id.output_text == by_items.output_text
        assert by_id.usage.input_tokens == by_items.usage.input_tokens


@pytest.mark.asyncio
async def test_what_is_wrong_is_named(models: tuple[str, ...]) -> None:
    """A model that there is not, one without a template, a value out of range, an old id."""
    cases: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
        (openai.NotFoundError, "model", {"model": "none"}),
        (openai.BadRequestError, "input", {"model": "demo"}),
        (openai.BadRequestError, "temperature", {"temperature": 200}),
        (openai.BadRequestError, "top_logprobs",
         {"include": ["message.output_text.logprobs"], "top_logprobs": 200}),
        (openai.BadRequestError, "max_output_tokens", {"max_output_tokens": -5}),
        (openai.NotFoundError, "previous_response_id", {"previous_response_id": "resp_old"}),
    ]  # fmt: skip
    async with serve_web(*models) as web, sdk(web) as client:
        for kind, field, fields in cases:
            with pytest.raises(kind) as caught:
                await client.responses.create(**{"model": "chatty", "input": "a", **fields})
            assert caught.value.param == field


@pytest.mark.asyncio
async def test_a_client_that_goes_frees_its_row(models: tuple[str, ...]) -> None:
    """In the middle of a stream: the worker has none left, without another request."""
    async with serve_web(*models) as web, sdk(web) as client:
        assert isinstance(web.served, Served)
        async with client.responses.stream(
            model="chatty", input="Once", max_output_tokens=ENDLESS
        ) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
        async with (
            Client(web.served.address) as direct,
            direct.watch_status(interval_s=0.1) as watch,
        ):
            async for status in watch:
                if not any(worker.streams_running for worker in status.workers):
                    break


@pytest.mark.asyncio
async def test_responses_are_their_keys_own(tmp_path: Path, models: tuple[str, ...]) -> None:
    """Another key is told that there is none, and a key that is removed, that it is none."""
    file = ("--keys-file", str(tmp_path / "keys.json"))
    secrets = [(await mlxd("keys", "add", name, *file)).out.strip() for name in ("ann", "bob")]
    async with (
        serve_web(*models, *file) as web,
        sdk(web, secrets[0]) as ann,
        sdk(web, secrets[1]) as bob,
    ):
        made = await ann.responses.create(model="chatty", input="Once", max_output_tokens=1)
        assert (await ann.responses.retrieve(made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(made.id)
        assert (await mlxd("keys", "remove", "ann", *file)).code == 0
        with pytest.raises(openai.AuthenticationError):
            await read_on(ann, made.id)


async def read_on(client: openai.AsyncOpenAI, response_id: str) -> None:
    """Read a response until the server has looked at its keys again."""
    for _ in range(LOOKS):
        await client.responses.retrieve(response_id)
