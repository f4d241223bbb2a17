"""The process: settings to a listening gateway, and its graceful stop.

Invariants:
- Its one line on stdout says where it can be dialled, once it can; it ends at SIGTERM, SIGINT, or
  when whoever started it is gone (`follow_parent`), with a grace for answers under way.
- An address that others can reach is served only as a controller serves it: protected, or by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from mlxd import Client
from mlxd_gateway.app import make_app
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.fetching import Fetcher
from mlxd_gateway.connection import Connection
from mlxd_gateway.door import Door
from mlxd_gateway.settings import Settings
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops import logs
from mlxd_shared.ops.signals import STOPPING, handling
from mlxd_shared.ops.tracing import tracer_of
from mlxd_shared.security.image_urls import check_image_urls
from mlxd_shared.security.listeners import ListenerSecurity
from mlxd_shared.security.net import Address, parse_address
from mlxd_shared.security.origins import check_origins
from mlxd_shared.security.unix_socket import claim_socket

BACKLOG = 2048
_READ_BYTES = 4096
_log = logs.get_logger("gateway")


class _Server(uvicorn.Server):
    """uvicorn's server, whose process has its own signals, and which says that it leaves."""

    def __init__(self, settings: uvicorn.Config, leaving: asyncio.Event) -> None:
        super().__init__(settings)
        self._leaving = leaving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and have those end that would not by themselves."""
        self._leaving.set()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


async def serve(settings: Settings, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, or until cancelled; then stop gracefully.

    `on_ready` is called once, with the URL, when requests are taken.

    Raises:
        InvalidRequest: an address or an option is wrong, or OTEL_* variables ask for what is not
            there.
        BadCredentials: a file cannot be used.
    """
    check_origins(settings.origins)
    check_image_urls(settings.image_urls)
    settings.check_keys()
    tracer = tracer_of("mlxd-gateway", os.environ)
    security = settings.files.load()
    address = parse_address(settings.listen)
    known = settings.pass_keys and security.identity is not None
    security.check(address, anywhere=settings.allow_remote or known)
    with listen_on(address, anywhere=settings.allow_remote) as listener:
        async with Clients(lambda: Client(settings.address, security=settings.channel)) as clients:
            door = Door(
                token=security.token,
                passes_keys=settings.pass_keys,
                origins=settings.origins,
                local=address.loopback and not address.is_unix,
            )
            leaving = asyncio.Event()
            app = make_app(
                clients,
                door,
                agent_rules=settings.agent_rules,
                fetcher=Fetcher(settings.image_urls) if settings.image_urls else None,
                leaving=leaving,
                tracer=tracer,
            )
            server = make_server(app, security, leaving=leaving)
            with _stopping(server, follow_parent=settings.follow_parent):
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                url = _url(address, listener, tls=security.identity is not None)
                _log.info("serving", url=url, controller=settings.address)
                on_ready(url)
                await serving
    if tracer is not None:
        tracer.close()
    _log.info("stopped")


def make_server(
    app: Any,  # noqa: ANN401 - starlette and uvicorn each have a type of their own for it
    security: ListenerSecurity,
    *,
    connection: type[Connection] = Connection,
    leaving: asyncio.Event | None = None,
) -> uvicorn.Server:
    """Return a server of `app`; `should_exit` has its `serve` return, after a grace.

    leaving: is set when that begins.
    """
    context = security.ssl_context()

    def keep(_: uvicorn.Config, __: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert context is not None
        return context

    settings = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=config.HTTP_HEAD_BYTES_MAX,
        timeout_keep_alive=round(config.HTTP_KEEP_ALIVE_S),
        timeout_graceful_shutdown=round(config.SHUTDOWN_GRACE_S),
        ssl_context_factory=None if context is None else keep,
    )
    return _Server(settings, leaving or asyncio.Event())


@contextlib.contextmanager
def listen_on(address: Address, *, anywhere: bool) -> Iterator[socket.socket]:
    """Listen around the body; a Unix socket's file is gone afterwards.

    Raises:
        InvalidRequest: the address is taken, or cannot be listened on.
    """
    if address.is_unix:
        listener = socket.socket(socket.AF_UNIX)
        with claim_socket(address.path, anywhere=anywhere):
            listener.bind(str(address.path))
    else:
        listener = _bind(address)
    try:
        listener.listen(BACKLOG)  # who dials before the server runs waits for it
        yield listener
    finally:
        listener.close()
        if address.is_unix:
            address.path.unlink(missing_ok=True)


def _bind(address: Address) -> socket.socket:
    host, _, port = address.target.rpartition(":")
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidRequest.of("http", f"cannot listen on {address.target}") from error
    return listener


def _url(address: Address, listener: socket.socket, *, tls: bool) -> str:
    if address.is_unix:
        return f"unix:{address.path}"
    host = address.target.rpartition(":")[0]
    return f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _stopping(server: uvicorn.Server, *, follow_parent: bool) -> Iterator[None]:
    """Have the server stop at a signal, and when standard input ends, around the body."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    def look() -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(sys.stdin.fileno(), _READ_BYTES):
                loop.remove_reader(sys.stdin.fileno())
                stop()

    if follow_parent:
        os.set_blocking(sys.stdin.fileno(), False)
        loop.add_reader(sys.stdin.fileno(), look)
    try:
        with handling(lambda _: stop(), *STOPPING):
            yield
    finally:
        if follow_parent:
            loop.remove_reader(sys.stdin.fileno())
