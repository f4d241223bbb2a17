"""A peer that has stopped, as a process on a machine that hangs: both ends learn of it in time."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd_shared import config
from mlxd_shared.security.net import (
    CHANNEL_OPTIONS,
    CLIENTS_OPTIONS,
    SERVER_OPTIONS,
    keepalive,
)
from tests.support.resets import ping

PINGS = 10
LIMIT_S = 45.0
"""Far above the two seconds that it should take, and below gRPC's own minute."""
QUICK = dict(keepalive(time_ms=1000, timeout_ms=1000))
WATCHER = """
import asyncio, sys, grpc
async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        call = channel.unary_stream("/test.Watched/Watch")(b"x")
        print(await call.read(), flush=True)
        await call.read()
asyncio.run(main())
"""


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run Python around the body; whatever has stopped it is killed at the end."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        started.kill()
        await started.communicate()


def test_both_ends_ask_as_often_and_wait_as_long() -> None:
    """Every option that a keepalive needs is in the options of servers and of channels."""
    wanted = keepalive(time_ms=config.KEEPALIVE_TIME_MS, timeout_ms=config.KEEPALIVE_TIMEOUT_MS)

    assert dict(wanted)["grpc.http2.ping_timeout_ms"] == config.KEEPALIVE_TIMEOUT_MS
    assert set(wanted) <= set(SERVER_OPTIONS)
    assert set(wanted) <= set(CHANNEL_OPTIONS)


def test_every_option_is_one_of_grpc_s() -> None:
    """gRPC ignores a name that it does not know, and some differ from those of its constants."""
    spec = find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).read_bytes()
    options = {*SERVER_OPTIONS, *CHANNEL_OPTIONS, *CLIENTS_OPTIONS}
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("interval_ms", "answered"), [(0, True), (600_000, False)])
async def test_a_client_may_ask_while_its_streams_are_silent(
    interval_ms: int, *, answered: bool
) -> None:
    """As often as the option says; one that asks more often is hung up on."""
    (name,) = (name for name, _ in SERVER_OPTIONS if "ping_interval" in name)
    assert dict(SERVER_OPTIONS)[name] < config.KEEPALIVE_TIME_MS
    server = grpc.aio.server(options=list({**dict(SERVER_OPTIONS), name: interval_ms}.items()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert (await asyncio.to_thread(ping, port, PINGS) == PINGS) == answered
    await server.stop(None)


@pytest.mark.asyncio
async def test_a_client_learns_of_a_server_that_has_stopped() -> None:
    """A stream to a stopped process ends with UNAVAILABLE, well before gRPC's own minute."""
    async with process("-m", "tests.support.bare_server") as server:
        assert server.stdout is not None
        address = (await server.stdout.readline()).decode().strip()
        options = list({**dict(CHANNEL_OPTIONS), **QUICK}.items())
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            server.send_signal(signal.SIGSTOP)

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(watch.read(), LIMIT_S)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_a_server_learns_of_a_client_that_has_stopped() -> None:
    """The call of a stopped process is cancelled, and gives back what it holds."""
    ended = asyncio.Event()

    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        del request, context
        try:
            yield b"begun"
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = grpc.aio.server(options=list({**dict(SERVER_OPTIONS), **QUICK}.items()))
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Watch": grpc.unary_stream_rpc_method_handler(watch)
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Watched", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with process("-c", WATCHER, f"127.0.0.1:{port}") as client:
        assert client.stdout is not None
        assert await client.stdout.readline() == b"b'begun'\n"
        client.send_signal(signal.SIGSTOP)

        await asyncio.wait_for(ended.wait(), LIMIT_S)
    await server.stop(None)
