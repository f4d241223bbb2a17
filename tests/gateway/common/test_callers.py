"""Keys that nobody knows are refused before a body is read; those that are known cost little."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from mlxd import Client, call_headers
from mlxd_gateway.common.callers import Callers
from mlxd_gateway.common.failures import FailureKind, Refused
from mlxd_shared import config
from mlxd_shared.security.listeners import ListenerSecurity
from mlxd_shared.security.tokens import Token
from tests.fakes.mlxd_server import Answers, serving
from tests.support.gateways import gateway_over
from tests.support.spoken import answer_with_text

SECRET = "a-token-of-sixteen-letters"
KNOWN = ListenerSecurity(token=Token(SECRET))
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PATHS = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/rerank")


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_nothing_of_a_strangers_body_is_read(path: str) -> None:
    """What is no JSON, or never comes, is not even looked at."""
    async with (
        serving(Answers(), security=KNOWN) as fake,
        gateway_over(fake.address, passes_keys=True) as web,
    ):
        answer = await web.post(path, b"no JSON", headers={"x-api-key": "nobody-knows-this-key"})
        assert answer.status_code == 401
        host, port = web.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nx-api-key: nobody-knows-this-key\r\n"
        writer.write(f"{head}Content-Length: 999\r\n\r\n".encode())
        assert b" 401 " in await reader.readline()
        writer.close()
        assert fake.requests == []


@pytest.mark.asyncio
async def test_who_is_known_is_served() -> None:
    """Its key goes on with the call."""
    answers = Answers(generate=answer_with_text())
    async with (
        serving(answers, security=KNOWN) as fake,
        gateway_over(fake.address, passes_keys=True) as web,
    ):
        for _ in range(2):
            answer = await web.post(PATHS[0], CHAT, headers={"x-api-key": SECRET})
            assert answer.status_code == 200
        assert len(fake.requests) == 2


@pytest.mark.asyncio
async def test_health_without_a_key_is_nothing_to_warn_of() -> None:
    """It is open; a key that nobody knows is told of in the log all the same."""
    async with (
        serving(Answers(), security=KNOWN) as fake,
        gateway_over(fake.address, passes_keys=True) as web,
    ):
        with capture_logs() as lines:
            assert (await web.http.get("/health")).status_code == 200
        assert not any(line["event"] == "calls without valid credentials" for line in lines)
        with capture_logs() as lines:
            await web.post(PATHS[0], CHAT, headers={"x-api-key": "nobody-knows-this-key"})
        assert any(line["event"] == "calls without valid credentials" for line in lines)


@contextmanager
def carry_key(secret: str) -> Iterator[None]:
    """Call with this key around the body."""
    marked = call_headers.set((("authorization", f"Bearer {secret}"),))
    try:
        yield
    finally:
        call_headers.reset(marked)


class CountingClient(Client):
    """A client that counts how often it asks for health."""

    asks = 0

    async def healthy(self, service: str = "") -> bool:
        """Ask, and count."""
        self.asks += 1
        return await super().healthy(service)


@pytest.mark.asyncio
async def test_a_known_key_is_asked_about_now_and_then() -> None:
    """Once in KEY_KNOWN_S; whoever has no key is not asked about at all; one of many is let go."""
    clock_s = 0.0
    async with serving(Answers(), security=KNOWN) as fake, CountingClient(fake.address) as client:
        callers = Callers(client, now_s=lambda: clock_s)
        await callers.check()
        assert client.asks == 0
        with carry_key(SECRET):
            await callers.check()
            await callers.check()
            assert client.asks == 1
            clock_s = config.KEY_KNOWN_S
            await callers.check()
            assert client.asks == 2
        with carry_key("nobody-knows-this-key"):
            for asks in (3, 4):
                with pytest.raises(Refused) as caught:
                    await callers.check()
                assert caught.value.failure.kind is FailureKind.UNAUTHENTICATED
                assert client.asks == asks


@pytest.mark.asyncio
async def test_where_no_controller_answers_the_call_tells() -> None:
    """A question that fails refuses nobody: the request itself will be told why."""
    async with Client("127.0.0.1:1", timeout_s=5.0) as client:
        with carry_key(SECRET):
            await Callers(client).check()


@pytest.mark.asyncio
async def test_so_many_keys_are_kept_and_no_more() -> None:
    """What was known longest ago goes first; of each a hash."""
    async with serving(Answers()) as fake, CountingClient(fake.address) as client:
        callers = Callers(client, now_s=lambda: 0.0, keys_max=2)
        for key, asks in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("b", 3), ("a", 4)):
            with carry_key(key):
                await callers.check()
            assert client.asks == asks
        assert not any(known in (b"a", b"b", b"c") for known in callers._known_s)
