"""Connections to the controller: streams are spread, and questions have one of their own."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from mlxd import Client
from mlxd_gateway.common.clients import CONNECTIONS_MAX, Clients
from mlxd_shared import config
from tests.fakes.mlxd_server import Answers, serving
from tests.support.gateways import gateway_over
from tests.support.spoken import answer_with_text

FILL = config.STREAMS_PER_CONNECTION_MAX


@pytest.mark.asyncio
async def test_a_connection_is_opened_when_the_others_are_full() -> None:
    """128 streams on the first, the next on another; one that ends makes room on its own."""
    made: list[Client] = []

    def make() -> Client:
        made.append(Client("127.0.0.1:1"))
        return made[-1]

    async with Clients(make) as clients, AsyncExitStack() as lent:
        first = [await lent.enter_async_context(clients.lend()) for _ in range(FILL - 1)]
        async with clients.lend() as last:
            assert {*first, last} == {made[1]}
            async with clients.lend() as other:
                assert (other, len(made)) == (made[2], 3)
        async with clients.lend() as again:
            assert again is made[2]
        assert clients.shared is made[0]
        for _ in range(CONNECTIONS_MAX * FILL - FILL + 2):
            await lent.enter_async_context(clients.lend())
        assert len(made) == CONNECTIONS_MAX + 1


@pytest.mark.asyncio
async def test_questions_do_not_wait_behind_streams() -> None:
    """More streams than a server takes of one connection: all begin, and models are listed."""
    answers = Answers(generate=answer_with_text()[:1], hold=True)
    body = {"model": "demo", "prompt": "a", "stream": True}
    async with (
        serving(answers, calls_max=config.CALLS_MAX) as fake,
        gateway_over(fake.address) as web,
        AsyncExitStack() as streams,
    ):
        for _ in range(FILL + 2):
            answer = web.http.stream("POST", "/v1/completions", json=body)
            opened = await streams.enter_async_context(answer)
            assert await anext(opened.aiter_raw())
        assert (await web.http.get("/v1/models")).status_code == 200
        assert len(fake.metadata) == FILL + 2
