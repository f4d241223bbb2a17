"""The scrape endpoint: what it answers, to whom, and its bounds, over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from mlxd.v1 import status_pb2
from mlxd_controller.metrics.exposition import render
from mlxd_controller.metrics.http import HEAD_BYTES_MAX, METHODS, parse_head, serving_metrics
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security import bearer
from mlxd_shared.security.listeners import OPEN, ListenerFiles, ListenerSecurity
from tests.support.certificates import SECRET, Authority, token_file
from tests.support.turns import turn_until

TIMEOUT_S = 60.0
LARGE_NBYTES = 48 * config.MIB
"""More than a system keeps between two sockets."""
AUTHORISED = f"Authorization: Bearer {SECRET}\r\n"


@dataclass(slots=True)
class Source:
    """What is scraped: a status, or an error.

     Where `enough` is more than 1, no read ends before `gate` is open; `begun` tells of that many.
    ."""

    error: Exception | None = None
    reads: int = 0
    enough: int = 1
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> bytes:
        self.reads += 1
        if self.reads >= self.enough:
            self.begun.set()
        if self.enough > 1:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return render(status_pb2.Status(version="7"))


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    code: int
    headers: dict[str, str]
    body: str


async def exchange(
    address: str, raw: str | bytes, *, tls: ssl.SSLContext | None = None
) -> Reply | None:
    """Send bytes and read to the end; None where nothing came back."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    writer.write(raw.encode() if isinstance(raw, str) else raw)
    try:
        got = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    except ConnectionResetError:
        got = b""
    writer.close()
    if not got:
        return None
    head, _, body = got.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Reply(int(first.split(" ")[1]), headers, body)


def get(path: str = "/metrics", *, more: str = "", method: str = "GET") -> str:
    """A request."""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n"


@asynccontextmanager
async def endpoint(
    source: Source | None = None, security: ListenerSecurity = OPEN
) -> AsyncIterator[str]:
    """The endpoint on a port of its own."""
    read = source or Source()
    async with serving_metrics("localhost:0", read, security=security) as address:
        yield address


@pytest.mark.asyncio
async def test_a_scrape_is_text_that_prometheus_reads() -> None:
    """GET /metrics gives the families, whole, and closes."""
    async with endpoint() as address:
        reply = await exchange(address, get("/metrics?x=1"))

    assert reply is not None
    assert (reply.code, reply.headers["Connection"]) == (200, "close")
    assert int(reply.headers["Content-Length"]) == len(reply.body.encode())
    names = {family.name for family in text_string_to_metric_families(reply.body)}
    assert "mlxd_build_info" in names


@pytest.mark.asyncio
async def test_head_has_no_body() -> None:
    """HEAD tells the length and sends nothing of it."""
    async with endpoint() as address:
        reply = await exchange(address, get(method="HEAD"))

    assert reply is not None
    assert (reply.code, reply.body) == (200, "")
    assert int(reply.headers["Content-Length"]) > 0


BAD: dict[str, tuple[str | bytes, int]] = {
    "another path": (get("/"), 404),
    "another method": (get(method="POST"), 405),
    "no HTTP": ("hello\r\n\r\n", 400),
    "another version": ("GET /metrics HTTP/2.0\r\n\r\n", 400),
    "a broken header": (get(more="no colon here\r\n"), 400),
    "a folded header": (get(more="a: b\r\n c: d\r\n"), 400),
    "two authorizations": (get(more=AUTHORISED * 2), 400),
    "too many headers": (get(more="a: b\r\n" * 65), 400),
    "too long a head": (get(more="a: " + "b" * HEAD_BYTES_MAX + "\r\n"), 431),
    "raw bytes": (b"\xff\xfe\x00\r\n\r\n", 400),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("case", BAD)
async def test_anything_else_is_refused(case: str) -> None:
    """Bad requests get their code, nothing is read for them, and the next scrape is good."""
    source = Source()
    raw, code = BAD[case]
    async with endpoint(source) as address:
        reply = await exchange(address, raw)
        assert reply is None or reply.code == code  # a reset may overtake a refusal
        assert reply is not None or code == 431
        assert source.reads == 0
        if reply is not None and code == 405:
            assert reply.headers["Allow"] == ", ".join(METHODS)
        good = await exchange(address, get())
        assert good is not None
        assert good.code == 200


@pytest.mark.asyncio
async def test_a_bug_is_logged_and_not_shown() -> None:
    """The client gets 500 without a word of the cause."""
    async with endpoint(Source(RuntimeError("secret path"))) as address:
        with capture_logs() as lines:
            reply = await exchange(address, get())

    assert reply is not None
    assert (reply.code, reply.body) == (500, "internal server error\n")
    assert [line["event"] for line in lines] == ["cannot render the metrics"]


@pytest.mark.asyncio
async def test_connections_have_a_bound() -> None:
    """One more than METRICS_CONNECTIONS_MAX is told so at once; the others are still served."""
    source = Source(enough=config.METRICS_CONNECTIONS_MAX)
    async with endpoint(source) as address:
        first = [
            asyncio.create_task(exchange(address, get()))
            for _ in range(config.METRICS_CONNECTIONS_MAX)
        ]
        await source.begun.wait()
        more = await exchange(address, b"")
        source.gate.set()
        replies = await asyncio.gather(*first)

    assert more is not None
    assert more.code == 503
    assert {reply.code for reply in replies if reply is not None} == {200}


@pytest.mark.asyncio
async def test_closing_drops_who_is_connected() -> None:
    """The endpoint's end does not wait for a client that says nothing."""
    async with endpoint() as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET ")
        await writer.drain()
        assert (await exchange(address, get())) is not None  # the first is being served by now

    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
    writer.close()


@pytest.mark.asyncio
async def test_a_stranger_learns_nothing(tmp_path: Path) -> None:
    """Without the token every path and method gets one and the same answer."""
    source = Source()
    security = ListenerFiles(token_file=token_file(tmp_path)).load()
    replies = []
    async with endpoint(source, security) as address:
        for more in ("", "Authorization: Bearer wrong-wrong-wrong\r\n", "Authorization: x\r\n"):
            for path, method in (("/metrics", "GET"), ("/nothing", "GET"), ("/metrics", "PUT")):
                replies.append(await exchange(address, get(path, more=more, method=method)))
        assert source.reads == 0
        good = await exchange(address, get(more=AUTHORISED))

    assert all(reply == replies[0] for reply in replies)
    assert replies[0] is not None
    assert (replies[0].code, replies[0].body) == (401, bearer.REFUSAL + "\n")
    assert good is not None
    assert good.code == 200


@pytest.mark.asyncio
async def test_tls_and_client_certificates_work_here_too(tmp_path: Path) -> None:
    """The files of the gRPC listener protect the scrape as well."""
    authority = Authority(tmp_path)
    server, client = authority.issue(), authority.issue("client")
    security = ListenerFiles(server.cert, server.key, authority.path).load()
    right = ssl.create_default_context(cafile=str(authority.path))
    without = ssl.create_default_context(cafile=str(authority.path))
    right.load_cert_chain(client.cert, client.key)
    async with endpoint(security=security) as address:
        good = await exchange(address, get(), tls=right)
        assert good is not None
        assert good.code == 200
        try:
            refused = await exchange(address, get(), tls=without)
        except ssl.SSLError:
            refused = None
        assert refused is None
        assert await exchange(address, get()) is None  # plain text


@pytest.mark.asyncio
async def test_others_reach_it_only_where_that_is_meant() -> None:
    """The rule of the gRPC listener holds, and a taken port is refused by name."""
    with pytest.raises(InvalidRequest, match="not loopback"):
        async with serving_metrics("0.0.0.0:0", Source()):
            pass
    async with serving_metrics("0.0.0.0:0", Source(), anywhere=True) as address:
        with pytest.raises(InvalidRequest, match="cannot listen on"):
            async with serving_metrics(address, Source(), anywhere=True):
                pass
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        async with serving_metrics("unix:/run/x", Source()):
            pass


def test_a_head_is_read_strictly() -> None:
    """Names in lower case, values bare, the query dropped."""
    request = parse_head(b"GET /metrics?a=b HTTP/1.0\r\nAccept:  text/plain \r\n\r\n")

    assert (request.method, request.path) == ("GET", "/metrics")
    assert request.headers == {"accept": "text/plain"}


@pytest.mark.asyncio
async def test_who_does_not_read_is_dropped() -> None:
    """Once its time is over, with what it has not taken: no connection stays for it."""

    async def read() -> bytes:
        return b"7" * LARGE_NBYTES

    with capture_logs() as lines:
        async with serving_metrics("localhost:0", read, timeout_s=1.0) as address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(get().encode())
            await turn_until(lambda: any(line["event"] == "a scrape was dropped" for line in lines))
            try:
                taken = len(await asyncio.wait_for(reader.read(), TIMEOUT_S))
            except ConnectionResetError:
                taken = 0
    assert taken < LARGE_NBYTES
    writer.close()
