"""The endpoint that Prometheus scrapes: GET /metrics over HTTP, and nothing else.

One request per connection, at most METRICS_CONNECTIONS_MAX connections, HEAD_BYTES_MAX bytes of a
request and METRICS_TIMEOUT_S for all of it; a request beyond a limit is refused or dropped. It is
protected like the gRPC listener: TLS, client certificates, the token or a key. Callers without
access learn nothing, not even whether a path exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.bearer import REFUSAL, Refusals
from mlxd_shared.security.keys import Scope
from mlxd_shared.security.listeners import OPEN, ListenerSecurity
from mlxd_shared.security.net import parse_address

PATH = "/metrics"
HEAD_BYTES_MAX = 16 * config.KIB
HEAD_LINES_MAX = 64
METHODS = ("GET", "HEAD")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The only format: OpenMetrics allows no colon in a name, but routers ask for such names."""

Scrape = Callable[[], Awaitable[bytes]]
"""Returns the text of a scrape, in the format of CONTENT_TYPE."""
_PLAIN = "text/plain; charset=utf-8"
_log = get_logger("metrics")


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that are used. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response."""

    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, status: HTTPStatus, *headers: tuple[str, str], text: str = "") -> Answer:
        """Return a short answer in plain text."""
        return cls(status, f"{text or status.phrase.lower()}\n".encode(), headers=headers)


def parse_head(head: bytes) -> Request:
    """Parse the head of a request, up to and including its empty line.

    Raises:
        ValueError: it is not HTTP/1, has too many lines, or two Authorization headers.
    """
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, version = first.split(" ")
    if version not in {"HTTP/1.0", "HTTP/1.1"} or len(lines) > HEAD_LINES_MAX:
        raise ValueError("not HTTP/1, or too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise ValueError("a malformed header")
        if name.lower() == "authorization" and name.lower() in headers:
            raise ValueError("two Authorization headers")
        headers[name.lower()] = value.strip()
    return Request(method, target.partition("?")[0], headers)


class _Endpoint:
    """Answers connections, each of them once."""

    def __init__(self, scrape: Scrape, security: ListenerSecurity, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._scrape = scrape
        self._security = security
        self._refusals = Refusals()
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request, answer it, close."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(reader, writer)
        except (TimeoutError, OSError, EOFError) as error:
            _log.debug("a scrape was dropped", reason=type(error).__name__)
            writer.transport.abort()  # closing would wait for a reader that does not read
        finally:
            self._serving.remove(task)
            writer.close()

    async def close(self) -> None:
        """End every connection."""
        serving = tuple(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) > config.METRICS_CONNECTIONS_MAX:
            return await _send(writer, Answer.of(HTTPStatus.SERVICE_UNAVAILABLE))
        try:
            request = parse_head(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            return await _send(writer, Answer.of(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        except ValueError:
            return await _send(writer, Answer.of(HTTPStatus.BAD_REQUEST))
        peer = str(writer.get_extra_info("peername"))
        answer = await self._answer(request, peer)
        return await _send(writer, answer, body=request.method != "HEAD")

    async def _answer(self, request: Request, peer: str) -> Answer:
        if self._security.needs_secret:
            caller = self._security.caller_of(request.headers.get("authorization", ""))
            if caller is None:
                self._refusals.note(peer)
                challenge = ("WWW-Authenticate", "Bearer")
                return Answer.of(HTTPStatus.UNAUTHORIZED, challenge, text=REFUSAL)
            if not caller.may(frozenset({Scope.OBSERVE})):
                return Answer.of(HTTPStatus.FORBIDDEN, text="needs the scope observe")
        if request.path != PATH:
            return Answer.of(HTTPStatus.NOT_FOUND, text=f"there is only {PATH}")
        if request.method not in METHODS:
            return Answer.of(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", ", ".join(METHODS)))
        try:
            text = await self._scrape()
        except Exception as error:  # noqa: BLE001 - a bug here must not end the controller
            _log.error("cannot render the metrics", exc_info=error)
            return Answer.of(HTTPStatus.INTERNAL_SERVER_ERROR)
        return Answer(HTTPStatus.OK, text, CONTENT_TYPE)


async def _send(writer: asyncio.StreamWriter, answer: Answer, *, body: bool = True) -> None:
    head = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in answer.headers),
    ]
    writer.transport.set_write_buffer_limits(high=0)  # makes `drain` wait until all is sent
    writer.write("\r\n".join([*head, "", ""]).encode("latin-1") + (answer.body if body else b""))
    await writer.drain()


@asynccontextmanager
async def serving_metrics(
    address: str,
    scrape: Scrape,
    *,
    security: ListenerSecurity = OPEN,
    anywhere: bool = False,
    timeout_s: float = config.METRICS_TIMEOUT_S,
) -> AsyncIterator[str]:
    """Serve what `scrape` returns around the body; yields HOST:PORT with the port in use.

    timeout_s: for one whole request, from the connection to the last byte.

    Raises:
        InvalidRequest: `address` is not HOST:PORT, is in use, or can be reached by others although
            neither `security` nor `anywhere` allows that.
    """
    parsed = parse_address(address)
    if parsed.is_unix:
        raise InvalidRequest.of("metrics", "is HOST:PORT")
    security.check(parsed, anywhere=anywhere)
    context = security.ssl_context()
    host, _, port = parsed.target.rpartition(":")
    endpoint = _Endpoint(scrape, security, timeout_s=timeout_s)
    try:
        server = await asyncio.start_server(
            endpoint.serve,
            host.strip("[]"),
            int(port),
            limit=HEAD_BYTES_MAX,
            ssl=context,
            ssl_handshake_timeout=timeout_s if context else None,
        )
    except OSError as error:
        raise InvalidRequest.of("metrics", f"cannot listen on {parsed.target}") from error
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await endpoint.close()
