"""Gateways for tests: in this process over any controller, or whole, as `mlxd serve --http` is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx2

from mlxd import Client
from mlxd_gateway.app import make_app
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.fetching import Fetcher
from mlxd_gateway.door import Door
from mlxd_gateway.process import listen_on, make_server
from mlxd_shared import config
from mlxd_shared.ops.tracing import Tracer
from mlxd_shared.security.listeners import OPEN
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.tokens import Token
from tests.support.cli import LIMIT_S
from tests.support.served import Served, serve

ANY = httpx2.Limits(max_connections=None)
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Web:
    """A gateway that takes requests, and a plain client of it."""

    url: str
    http: httpx2.AsyncClient
    served: Served | None = None

    async def post(
        self, path: str, body: object, *, headers: Mapping[str, str] = NO_HEADERS
    ) -> httpx2.Response:
        """Return the answer to a body, which is sent as it is where it is bytes, else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, headers=dict(headers))

    async def error(self, path: str, body: object) -> tuple[int, Any]:
        """Return the status and the JSON of the answer to a body."""
        answer = await self.post(path, body)
        return answer.status_code, answer.json()


@asynccontextmanager
async def gateway_over(
    address: str,
    *,
    token: Token | None = None,
    origins: tuple[str, ...] = (),
    local: bool = True,
    passes_keys: bool = False,
    agent_rules: bool = True,
    fetcher: Fetcher | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Web]:
    """Serve a gateway over the controller at `address`, in this event loop, around the body."""
    where = parse_address("127.0.0.1:0")
    with listen_on(where, anywhere=False) as listener:
        async with Clients(lambda: Client(address)) as clients:
            door = Door(token, passes_keys, origins, local)
            leaving = asyncio.Event()
            app = make_app(
                clients,
                door,
                agent_rules=agent_rules,
                fetcher=fetcher,
                leaving=leaving,
                tracer=tracer,
            )
            server = make_server(app, OPEN, leaving=leaving)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S, limits=ANY) as http:
                    yield Web(url, http)
            finally:
                server.should_exit = True
                await serving


@asynccontextmanager
async def serve_web(
    *options: str, environment: Mapping[str, str] = NO_HEADERS
) -> AsyncIterator[Web]:
    """Run `mlxd serve --http` with `options` around the body."""
    async with serve("--http", "127.0.0.1:0", *options, environment=environment) as served:
        assert served.process.stdout is not None
        line = (await asyncio.wait_for(served.process.stdout.readline(), LIMIT_S)).decode().strip()
        assert line.startswith(config.GATEWAY_LISTENS), served.log_path.read_text(encoding="utf-8")
        url = line.removeprefix(config.GATEWAY_LISTENS)
        async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
            yield Web(url, http, served)
