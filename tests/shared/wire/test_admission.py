"""More calls at once than a server takes: each is answered, or told when to come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, QueueFull
from mlxd_shared.security.net import CHANNEL_OPTIONS, SERVER_OPTIONS, parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.admission import AdmissionInterceptor, Room
from mlxd_shared.wire.status import from_call
from tests.support.resets import concurrent_streams_max, flood

SERVICE, METHOD = "test.Held", "/test.Held/Hold"
CROWD = 6000
CONNECTIONS = 60
assert CROWD // CONNECTIONS < config.STREAMS_PER_CONNECTION_MAX  # or some would wait in the client
LIMIT_S = 60.0
INNOCENT = 50
"""So many that some would be cancelled where calls are cancelled at random."""
UNTAKEN_S = 2.0
"""In which a call that the server has not taken would be cancelled, were it to be."""


class Held:
    """Calls that last until they are let go."""

    def __init__(self) -> None:
        self.taken = 0
        self.let_go = asyncio.Event()

    async def hold(self, request: bytes, context: Any) -> bytes:
        """Answer once calls may end."""
        del context
        self.taken += 1
        await self.let_go.wait()
        return request


@asynccontextmanager
async def serving(held: Held, calls_max: int | None) -> AsyncIterator[int]:
    """Serve around the body; yields the port."""
    health_of = Health()
    await health_of.set("", serving=True)
    server = make_server(health_of, (), calls_max=calls_max)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Hold": grpc.unary_unary_rpc_method_handler(held.hold)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    target = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    try:
        yield int(target.rpartition(":")[2])
    finally:
        held.let_go.set()
        await server.stop(None)


@asynccontextmanager
async def dialling(port: int, connections: int = 1) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Channels of a connection each."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            for _ in range(connections)
        ]
        yield [await stack.enter_async_context(channel) for channel in channels]


async def hold(channel: grpc.aio.Channel) -> MlxdError | None:
    """Make one call; return its error."""
    call: Any = channel.unary_unary(METHOD)
    try:
        await call(b"x")
    except grpc.aio.AioRpcError as error:
        return from_call(error)
    return None


@pytest.mark.asyncio
async def test_thousands_at_once_are_served_or_told_when_to_come_back() -> None:
    """Of 6,000 calls as many are taken as there are places; each other hears of its own time."""
    held = Held()
    refused: list[QueueFull] = []

    async def one(channel: grpc.aio.Channel) -> MlxdError | None:
        error = await hold(channel)
        if isinstance(error, QueueFull):
            refused.append(error)
            if len(refused) == CROWD - config.CALLS_MAX:
                held.let_go.set()
        elif error is not None:
            held.let_go.set()
        return error

    async with serving(held, config.CALLS_MAX) as port, dialling(port, CONNECTIONS) as channels:
        calls = [one(channels[number % CONNECTIONS]) for number in range(CROWD)]
        errors = await asyncio.gather(*calls)

    ends = Counter("OK" if error is None else type(error).__name__ for error in errors)
    assert ends == {"OK": config.CALLS_MAX, "QueueFull": CROWD - config.CALLS_MAX}
    assert held.taken == config.CALLS_MAX
    assert {(error.queue, error.limit) for error in refused} == {("calls", config.CALLS_MAX)}
    waits = sorted(error.retry_after_s for error in refused)
    assert waits[0] >= config.CALLS_RETRY_MIN_S
    in_one_tenth = Counter(int(wait / 0.1) for wait in waits)
    assert max(in_one_tenth.values()) < len(refused) / 4


@pytest.mark.asyncio
async def test_one_connection_may_begin_any_number_of_calls() -> None:
    """What a client begins beyond its connection's streams waits in the client, and is served."""
    held = Held()
    held.let_go.set()
    async with serving(held, config.CALLS_MAX) as port, dialling(port) as [channel]:
        errors = await asyncio.gather(*(hold(channel) for _ in range(CROWD)))

    assert {type(error) for error in errors} == {type(None)}


@pytest.mark.asyncio
async def test_streams_that_are_reset_at_once_cost_others_nothing() -> None:
    """Peers' thousands of resets, none taken yet, leave room for every call of another peer.

    By gRPC's own bounds most of these end in a bare CANCELLED. It takes many connections: the bound
    of one connection's streams holds for what is reset and not taken yet, too.
    """
    held = Held()
    held.let_go.set()
    async with serving(held, config.CALLS_MAX) as port:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call: Any = channel.unary_unary(METHOD)
            assert await asyncio.to_thread(call, b"before") == b"before"
            # From here to the next await this thread takes no call: all that come have to wait.
            for _ in range(CONNECTIONS):
                flood(port, METHOD, CROWD // CONNECTIONS)
            waiting = [call.future(b"after") for _ in range(INNOCENT)]
            with pytest.raises(grpc.FutureTimeoutError):
                waiting[0].exception(timeout=UNTAKEN_S)
            results = [await asyncio.to_thread(one.exception, LIMIT_S) for one in waiting]

    assert results == [None] * INNOCENT


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("calls_max", "expected"), [(1, config.STREAMS_PER_CONNECTION_MAX), (None, None)]
)
async def test_a_connection_is_told_how_many_streams_it_has(
    calls_max: int | None, expected: int | None
) -> None:
    """A stranger's is; a worker's one client, the controller, has as many as it likes."""
    async with serving(Held(), calls_max) as port:
        streams_max = await asyncio.to_thread(concurrent_streams_max, port)

    assert streams_max == expected


@pytest.mark.asyncio
async def test_a_full_server_says_how_it_is() -> None:
    """Health is answered while calls are refused, and a place given back is taken again."""
    held = Held()
    async with serving(held, 1) as port, dialling(port) as [channel]:
        first = asyncio.create_task(hold(channel))
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while not held.taken:
            await stub.Check(health_pb2.HealthCheckRequest())
        error = await hold(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        held.let_go.set()
        assert await first is None
        later = await hold(channel)

    assert isinstance(error, QueueFull)
    assert str(error) == "the queue of calls is full (limit 1)"
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert later is None


@pytest.mark.asyncio
async def test_a_call_whose_client_has_gone_gives_its_place_back() -> None:
    """Places are those of tasks: one that was cancelled leaves nothing behind."""
    held = Held()
    async with serving(held, 1) as port, dialling(port) as [channel]:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for taken in range(1, 4):
            method: Any = channel.unary_unary(METHOD)
            call = method(b"x")
            while held.taken < taken:
                await stub.Check(health_pb2.HealthCheckRequest())
            call.cancel()
            while isinstance(await refused_at_once(channel), QueueFull):
                pass


async def refused_at_once(channel: grpc.aio.Channel) -> MlxdError | None:
    """Return the error of a call that is not read: none where the server takes it."""
    call: Any = channel.unary_unary("/test.Held/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"x")
    return from_call(caught.value)


def test_inquiries_have_a_bound_of_their_own() -> None:
    """Health and status are counted too, beside all others."""
    room = Room("health and status calls", config.INQUIRIES_MAX)
    for _ in range(config.INQUIRIES_MAX):
        room.enter()

    with pytest.raises(QueueFull, match=r"health and status calls is full \(limit 1024\)"):
        room.enter()
    room.leave()
    room.enter()
    assert room.taken == config.INQUIRIES_MAX
    assert isinstance(AdmissionInterceptor(1), grpc.aio.ServerInterceptor)


def test_a_call_that_waits_to_be_taken_is_not_dropped() -> None:
    """gRPC's own bound, half a minute, is shorter than a full server takes for thousands."""
    name = "grpc.server_max_unrequested_time_in_server"

    assert dict(SERVER_OPTIONS)[name] == config.PENDING_CALL_MAX_S > 30
