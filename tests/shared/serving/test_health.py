"""grpc.health.v1, as those hear it who ask or watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd_shared.config import HEALTH_NAMES_MAX
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.health import Health
from mlxd_shared.serving.server import listen, make_server
from tests.support.turns import turn_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def serve_health(health: Health) -> AsyncIterator[Any]:
    """Serve this health around the body, which is given a stub."""
    server = make_server(health, ())
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


def of(name: str) -> health_pb2.HealthCheckRequest:
    """Return the request that asks for a name."""
    return health_pb2.HealthCheckRequest(service=name)


@pytest.mark.asyncio
async def test_a_watcher_is_told_each_state() -> None:
    """Also that a name is none yet, or none any more; and what others' watches do is no matter."""
    health = Health()
    async with serve_health(health) as stub:
        first, second = stub.Watch(of("models/a")), stub.Watch(of("models/a"))
        for watch in (first, second):
            assert (await watch.read()).status == UNKNOWN
        second.cancel()
        await turn_until(lambda: len(health._watchers["models/a"]) == 1)
        for serving, state in ((False, NOT_SERVING), (True, SERVING)):
            await health.set("models/a", serving=serving)
            await health.set("models/b", serving=not serving)
            assert (await first.read()).status == state
        health.forget("models/a")
        assert (await first.read()).status == UNKNOWN
        await health.set("models/a", serving=True)
        assert (await first.read()).status == SERVING
        await health.leave()
        assert (await first.read()).status == NOT_SERVING
        first.cancel()
        await turn_until(lambda: not health._watchers)


@pytest.mark.asyncio
async def test_what_was_forgotten_is_not_found() -> None:
    """As a name is that nobody ever told."""
    health = Health()
    await health.set("models/a", serving=True)
    async with serve_health(health) as stub:
        assert (await stub.Check(of("models/a"))).status == SERVING
        health.forget("models/a")
        health.forget("models/never")
        for name in ("models/a", "models/never"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(of(name))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.asyncio
async def test_a_slow_watcher_holds_up_nobody_and_hears_the_latest() -> None:
    """What came and went meanwhile is not told."""
    health = Health()
    context: Any = None
    states = health.Watch(of("models/a"), context)
    assert (await anext(states)).status == UNKNOWN
    for serving in (True, False, True):
        await health.set("models/a", serving=serving)
    assert (await anext(states)).status == SERVING
    await health.set("models/a", serving=False)
    await health.set("models/a", serving=True)
    waiting = asyncio.ensure_future(anext(states))
    await asyncio.sleep(0)
    await health.set("models/a", serving=False)
    assert (await waiting).status == NOT_SERVING
    await states.aclose()


@pytest.mark.asyncio
async def test_names_are_bounded_and_what_serves_stays() -> None:
    """The name told longest ago makes room, unless it serves; where all do a new one has none."""
    health = Health()
    await health.set("oldest", serving=False)
    await health.set("renewed", serving=False)
    await health.set("serves", serving=True)
    for number in range(HEALTH_NAMES_MAX - 5):
        await health.set(f"n{number}", serving=False)
    await health.set("renewed", serving=False)
    await health.set("new", serving=False)
    assert health.of("oldest") == NOT_SERVING
    await health.set("newer", serving=False)
    known = {name: health.of(name) for name in ("oldest", "n0", "renewed", "serves", "")}
    assert known == {
        "oldest": UNKNOWN, "n0": NOT_SERVING, "renewed": NOT_SERVING, "serves": SERVING,
        "": SERVING,
    }  # fmt: skip

    for number in range(HEALTH_NAMES_MAX):
        await health.set(f"s{number}", serving=True)
    assert health.of(f"s{HEALTH_NAMES_MAX - 3}") == SERVING
    assert health.of(f"s{HEALTH_NAMES_MAX - 1}") == UNKNOWN
    assert len(health._serving) == HEALTH_NAMES_MAX
    await health.set("serves", serving=False)
    assert health.of("serves") == NOT_SERVING


@pytest.mark.asyncio
async def test_after_leaving_nothing_serves_whatever_is_told() -> None:
    """Nor does a name come back or go."""
    health = Health()
    await health.leave()
    await health.set("", serving=True)
    await health.set("models/a", serving=True)
    health.forget("")
    assert (health.of(""), health.of("models/a")) == (NOT_SERVING, UNKNOWN)
