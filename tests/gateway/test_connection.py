"""A connection is closed where a request does not come, and where nobody is there any more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxd_gateway.connection import Connection
from mlxd_gateway.process import listen_on, make_server
from mlxd_shared.security.listeners import OPEN
from mlxd_shared.security.net import parse_address

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
WHOLE = HEAD + b"\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"


class Impatient(Connection):
    """One that waits for next to no time."""

    head_s = 0.05
    write_s = 0.05


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """Serve `app` by impatient connections around the body; yields the port."""
    with listen_on(parse_address("127.0.0.1:0"), anywhere=False) as listener:
        server = make_server(app, OPEN, connection=Impatient)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, without a look at the body."""
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "sent", [b"", b"G", HEAD, WHOLE + HEAD, POST], ids=["none", "byte", "half", "second", "rest"]
)
async def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    """No head, half of one, half of the second one, or a body that nobody waits for."""
    async with serving(answer) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        said = await reader.read()
        assert said.count(b"HTTP/1.1 200") == (1 if sent.startswith((WHOLE, POST)) else 0)
        writer.close()


@pytest.mark.asyncio
async def test_a_request_that_takes_long_is_answered() -> None:
    """What is under way has all the time; another connection is closed meanwhile."""
    others_closed = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await others_closed.wait()
        await answer(scope, receive, send)

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE)
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        other_writer.write(HEAD)
        assert await other_reader.read() == b""
        others_closed.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        other_writer.close()


@pytest.mark.asyncio
async def test_the_system_asks_whether_a_client_is_there() -> None:
    """A laptop that was closed says nothing; its row is not kept for it."""
    options: list[int] = []

    class Watched(Impatient):
        def data_received(self, data: bytes) -> None:
            endpoint = self.transport.get_extra_info("socket")
            options.append(endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
            super().data_received(data)

    with listen_on(parse_address("127.0.0.1:0"), anywhere=False) as listener:
        server = make_server(answer, OPEN, connection=Watched)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(WHOLE)
        await reader.readline()
        writer.close()
        server.should_exit = True
        await task
    assert [bool(each) for each in options] == [True]


@pytest.mark.asyncio
async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    """The application learns that nobody is there, as of any client that has gone."""
    gone = asyncio.Event()

    async def write_on(scope: Scope, receive: Receive, send: Send) -> None:
        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        waiting = asyncio.create_task(wait())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.is_set():
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await waiting

    async with serving(write_on) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(WHOLE)
        await gone.wait()
        writer.close()
