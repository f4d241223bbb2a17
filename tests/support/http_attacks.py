"""Attacks on a gateway over bare sockets: bodies, heads and halves that are nearly right.

What becomes of each is counted by its status; a connection that was closed without one counts as
CLOSED, one that its client left as LEFT, and one on which nothing came for HANG_S as HANGS.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from mlxd_shared import config
from tests.support.http_bodies import BODIES, mutate

HANG_S = 2 * config.HTTP_BODY_S
"""More than a gateway waits for anything by itself."""
CLOSED, HANGS, LEFT = "CLOSED", "HANGS", "LEFT"
STREAM = {"model": "demo", "prompt": "Once", "max_tokens": 200, "stream": True}
HEADERS = (
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: x",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Expect: 100-continue",
    b"Content-Type: text/plain; charset=utf-7", b"Content-Encoding: gzip", b"Upgrade: websocket",
    b"X-Request-Id: " + b"a" * 5000, b"traceparent: 00-zz-1", b"Authorization: Bearer \xff",
    b"Accept: \x00", b": empty", b"No colon", b"X: " + b"b" * 100_000, b"Host: a, b",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """Where a gateway listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Target:
        """Return the place that a URL names."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(parts.hostname, parts.port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection(self.host, self.port)

    def head(self, path: str, length: int, *more: bytes) -> bytes:
        """Return the head of a request whose body has so many bytes."""
        lines = [
            f"POST {path} HTTP/1.1".encode(), f"Host: {self.host}:{self.port}".encode(), *more,
            f"Content-Length: {length}".encode(), b"Connection: close",
        ]  # fmt: skip
        return b"\r\n".join(lines) + b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A request in which something is wrong, and whether its client goes when it has sent it."""

    sent: bytes
    leaves: bool


def spoil(target: Target, draws: random.Random, *, silent: float) -> Spoilt:
    """Return a request in whose body, head or length something is wrong; or half of one.

    silent: how many of those who send too little stay, and say nothing more; the others go.
    """
    path = draws.choice(list(BODIES))
    body = mutate(path, draws)
    too_little = draws.random() >= silent
    match draws.randrange(7):
        case 0:
            return Spoilt(target.head(path, len(body), draws.choice(HEADERS)) + body, leaves=False)
        case 1:
            return Spoilt(target.head(path, len(body) + 7) + body, leaves=too_little)
        case 2:
            return Spoilt(target.head(path, len(body) // 2) + body, leaves=False)
        case 3:
            whole = target.head(path, len(body)) + body
            return Spoilt(whole[: draws.randrange(1, len(whole))], leaves=too_little)
        case 4:
            head = bytearray(target.head(path, len(body)))
            head[draws.randrange(len(head))] = draws.randrange(256)
            return Spoilt(bytes(head) + body, leaves=too_little)
        case _:
            return Spoilt(target.head(path, len(body)) + body, leaves=False)


async def send(target: Target, spoilt: Spoilt) -> str:
    """Send a request and nothing more; return the status of what comes, once all has come."""
    reader, writer = await target.connect()
    try:
        async with asyncio.timeout(HANG_S):
            writer.write(spoilt.sent)
            await writer.drain()
            if spoilt.leaves:
                return LEFT
            answer = await reader.read()
    except TimeoutError:
        return HANGS
    except ConnectionError:
        return CLOSED
    finally:
        writer.close()
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.") else CLOSED


async def attack(
    target: Target, *, count: int, at_once: int, silent: float, seed: int
) -> Counter[str]:
    """Send so many spoilt requests, some at a time; return what became of them."""
    draws = random.Random(seed)
    requests = [spoil(target, draws, silent=silent) for _ in range(count)]
    seen: Counter[str] = Counter()
    left = iter(requests)

    async def send_some() -> None:
        for request in left:
            seen[await send(target, request)] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(send_some())
    return seen


@asynccontextmanager
async def burden(target: Target, *, idle: int, slow: int) -> AsyncIterator[None]:
    """Have idle connections, and streams whose readers do not read, around the body."""
    body = json.dumps(STREAM).encode()
    writers = []
    try:
        for number in range(idle + slow):
            _, writer = await target.connect()
            writers.append(writer)
            if number >= idle:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(target.head("/v1/completions", len(body)) + body)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()
