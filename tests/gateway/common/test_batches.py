"""Several prompts in one request: choices are counted through, and none is left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mlxd import Client
from mlxd.v1 import inference_pb2
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.batches import Batch
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.generation import Generation
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.gateways import gateway_over
from tests.support.spoken import answer_with_text

PATH = "/v1/completions"
PROMPTS = ["a", "b", "c"]
BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPTS}


def prompts_at(fake: FakeServer) -> list[str]:
    """Return the texts that have come."""
    return [r.text for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]


@pytest.mark.asyncio
async def test_each_prompt_has_its_choices() -> None:
    """In the order of the prompts, streamed or not; the usage is that of all."""
    answers = Answers(
        generate=answer_with_text("1"),
        generate_again=[answer_with_text(text) for text in "23"],
    )
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        whole = (await web.post(PATH, BODY)).json()
        texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
        came = dict(zip(prompts_at(fake), "123", strict=True))
        assert texts == {index: came[prompt] for index, prompt in enumerate(PROMPTS)}
        assert whole["usage"]["prompt_tokens"] == 3 * 5
        ids = [r.request_id for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]
        assert len(set(ids)) == 3

        streamed = (await web.post(PATH, {**BODY, "stream": True})).text
        *chunks, done = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
        ends = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert sorted(end["index"] for end in ends if end["finish_reason"]) == [0, 1, 2]


@pytest.mark.asyncio
async def test_what_fails_is_named() -> None:
    """By the place of its prompt; the whole fails with it, though the others go on."""
    wrong = InvalidRequest.of("text", "is too long")
    held = Answers(generate=answer_with_text()[:1], generate_again=[[wrong]], hold=True)
    async with serving(held) as fake, gateway_over(fake.address) as web:
        status, error = await web.error(PATH, BODY)
        (index,) = [i for i, text in enumerate(PROMPTS) if text == prompts_at(fake)[1]]
        assert (status, error["error"]["param"]) == (400, f"prompt[{index}]")
    busy = Answers(generate=[QueueFull("streams", 4, retry_after_s=2.5)])
    async with serving(busy) as fake, gateway_over(fake.address) as web:
        assert (await web.post(PATH, {**BODY, "stream": True})).status_code == 429


@pytest.mark.asyncio
async def test_so_many_choices_at_once_and_no_more() -> None:
    """The others wait for their turn; whoever leaves leaves no stream behind."""
    many = config.CHOICES_MAX + 3
    answers = Answers(generate=answer_with_text()[:1], hold=True)
    async with serving(answers) as fake, Clients(lambda: Client(fake.address)) as clients:
        for n, at_once in ((None, config.CHOICES_MAX), (9, 1)):
            fake.requests.clear()
            asks = [Ask("demo", str(index), n=n) for index in range(many)]
            batch = Batch([Generation(clients, ask) for ask in asks])
            await batch.begin()
            events = batch.events()
            for _ in range(at_once):
                await anext(events)
            assert len(fake.requests) == at_once
            reading = asyncio.ensure_future(anext(events))
            await batch.aclose()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert len(fake.requests) == at_once
            async with clients.lend() as line:
                assert line is clients._lines[0].client
                assert clients._lines[0].streams == 1
