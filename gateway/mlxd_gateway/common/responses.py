"""Answers as they are sent: JSON at once, events and lines as they come, and none to who has gone.

Invariants:
- An answer that is streamed owns its generation from the handler's return on, and ends it however
  it ends: whole, with an error, or because its client has gone.
- A stream of events that is silent for HTTP_PING_S says so; lines of JSON have no way to say it.
- An event or line is sent whole: a JSON text holds no line break.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxd import Delta, Finished, MlxdError
from mlxd_gateway.common.failures import Failure, Refused, failure_of
from mlxd_gateway.common.generation import Source
from mlxd_shared import config

_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode
EVENT_STREAM, LINES = "text/event-stream", "application/x-ndjson"
Ping = Callable[[Source], Awaitable[bytes]]


class Writer(Protocol):
    """Writes one answer in an API's words: pure, and in order."""

    def begin(self) -> Iterable[bytes]:
        """Return what comes before the first event."""

    def write(self, event: Delta | Finished) -> Iterable[bytes]:
        """Return what an event adds."""

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return what tells of a failure in the middle."""


def write_event(value: object, name: str = "") -> bytes:
    """Return one server-sent event with `value` as its JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _encode(value) + b"\n\n"


def write_comment(text: str) -> bytes:
    """Return a comment, which readers of events pass over."""
    return f": {' '.join(text.split())}\n\n".encode()


def write_line(value: object) -> bytes:
    """Return `value` as a line of JSON."""
    return bytes(_encode(value)) + b"\n"


def json_response(value: object, status: int = 200) -> Response:
    """Return a whole answer."""
    return Response(_encode(value), status, media_type="application/json")


async def ping_by_comment(generation: Source) -> bytes:
    """Return a comment that tells what is being waited for."""
    return write_comment(await generation.describe_wait())


class GenerationResponse(StreamingResponse):
    """Streams a generation that was begun."""

    def __init__(
        self, generation: Source, writer: Writer, *, media_type: str, ping: Ping | None
    ) -> None:
        """Own `generation`; where it has not answered yet, the first ping comes at once."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._write(writer), headers=headers, media_type=media_type)
        self._generation = generation
        self._ping = ping
        self._sent_s = time.monotonic() if generation.has_begun else -config.HTTP_PING_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, unless the client goes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send head and body, and pings between."""
        if self._ping is None:
            await super().stream_response(send)
            return
        async with asyncio.TaskGroup() as tasks:
            pinging = tasks.create_task(self._send_pings(send, self._ping))
            await super().stream_response(send)
            pinging.cancel()

    async def _send_pings(self, send: Send, ping: Ping) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_s
            await asyncio.sleep(max(config.HTTP_PING_S - silent_s, 0.0))
            if time.monotonic() - self._sent_s >= config.HTTP_PING_S:
                body = await ping(self._generation)
                self._sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _write(self, writer: Writer) -> AsyncIterator[bytes]:
        for chunk in writer.begin():
            yield chunk
        try:
            async for event in self._generation.events():
                self._sent_s = time.monotonic()
                chunk = b"".join(writer.write(event))
                if chunk:
                    yield chunk
        except MlxdError as error:
            for chunk in writer.fail(failure_of(error, self._generation.ask.rename)):
                yield chunk


async def stream(
    request: Request, generation: Source, writer: Writer, *, media_type: str, ping: Ping | None
) -> Response:
    """Begin a generation and return the answer that streams it.

    Raises:
        Refused: the request failed before the answer began.
        ClientDisconnect: the client has gone.
    """
    try:
        await while_there(request, generation.begin(config.HTTP_FIRST_S))
    except MlxdError as error:
        await generation.aclose()
        raise Refused(failure_of(error, generation.ask.rename)) from error
    except BaseException:
        await generation.aclose()
        raise
    return GenerationResponse(generation, writer, media_type=media_type, ping=ping)


async def gather(request: Request, generation: Source) -> list[Delta | Finished]:
    """Return all events of a generation, which is over then.

    Raises:
        Refused: it failed.
        ClientDisconnect: the client has gone.
    """

    async def read() -> list[Delta | Finished]:
        await generation.begin()
        return [event async for event in generation.events()]

    try:
        return await while_there(request, read())
    except MlxdError as error:
        raise Refused(failure_of(error, generation.ask.rename)) from error
    finally:
        await generation.aclose()


async def while_there(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` returns; it is cancelled if the client goes. The body has been read.

    Raises:
        ClientDisconnect: the client has gone.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
