"""Health and status are answered however many bytes of requests a server holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd.v1 import inference_pb2, model_pb2, status_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, QueueFull
from mlxd_shared.security.net import CHANNEL_OPTIONS, parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.intake import Intake, Reader
from mlxd_shared.wire.interceptors import INQUIRY, is_inquiry
from mlxd_shared.wire.status import from_call
from mlxd_shared.wire.wire_scan import Size
from tests.support.overfull import frame, number

METHOD = "/mlxd.v1.InferenceService/Detokenize"
STATUS = "/mlxd.v1.StatusService/GetStatus"
NAME = "models/" + "n" * 200


@asynccontextmanager
async def holding(taken: asyncio.Semaphore) -> AsyncIterator[grpc.aio.Channel]:
    """Serve around the body; what is to be detokenized is noted, and never answered."""

    async def hold(request: inference_pb2.DetokenizeRequest, context: Any) -> Any:
        del request, context
        taken.release()
        await asyncio.Event().wait()

    async def tell(request: status_pb2.GetStatusRequest, context: Any) -> bytes:
        del request, context
        return b""

    health = Health()
    await health.set(NAME, serving=True)
    server = make_server(health, ())
    unary = grpc.unary_unary_rpc_method_handler
    for method, handler in (
        (METHOD, unary(hold, inference_pb2.DetokenizeRequest.FromString, None)),
        (STATUS, unary(tell, status_pb2.GetStatusRequest.FromString, None)),
    ):
        _, service, name = method.split("/")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {name: handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield channel
    await server.stop(None)


async def error_of(call: Any) -> MlxdError:
    """Return what a call ended with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_call(caught.value)


async def fill_up(channel: grpc.aio.Channel, taken: asyncio.Semaphore) -> None:
    """Send requests, large ones first, until the smallest is refused."""
    ask: Any = channel.unary_unary(METHOD)
    ids = config.TOKENIZE_IDS_MAX
    while ids:
        raw = inference_pb2.DetokenizeRequest(token_ids=[1] * ids).SerializeToString()
        call = asyncio.ensure_future(ask(raw))
        held = asyncio.ensure_future(taken.acquire())
        await asyncio.wait({call, held}, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            held.cancel()
            assert isinstance(await error_of(call), QueueFull)
            ids //= 2


@pytest.mark.asyncio
async def test_a_server_full_of_requests_still_says_how_it_is() -> None:
    """A request more is refused; health and status are answered, one to watch too."""
    taken = asyncio.Semaphore(0)
    async with holding(taken) as channel:
        await fill_up(channel, taken)
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=NAME)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        status: Any = channel.unary_unary(STATUS)
        assert await status(status_pb2.GetStatusRequest(model=NAME).SerializeToString()) == b""


def test_what_asks_how_a_server_is_is_an_inquiry() -> None:
    """Every method of health and status, and no other."""
    for service, asks in (
        (health_pb2.DESCRIPTOR.services_by_name["Health"], True),
        (status_pb2.DESCRIPTOR.services_by_name["StatusService"], True),
        (inference_pb2.DESCRIPTOR.services_by_name["InferenceService"], False),
        (model_pb2.DESCRIPTOR.services_by_name["ModelService"], False),
    ):
        for method in service.methods:
            assert is_inquiry(f"/{service.full_name}/{method.name}") is asks, method.full_name


def test_inquiries_cannot_fill_their_account() -> None:
    """The largest there may be, as many as a server works on at once."""
    largest = Size(INQUIRY.nbytes, INQUIRY.parts, INQUIRY.numbers)
    assert config.INQUIRIES_MAX * largest.held_nbytes <= config.INQUIRIES_HELD_BYTES_MAX
    longest = 4 * max(config.MODEL_NAME_CHARS_MAX, len("models/") + config.PATH_CHARS_MAX // 4)
    assert longest < INQUIRY.nbytes < config.INLINE_REQUEST_BYTES_MAX  # read at once


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "raw",
    [frame(1, b"x" * config.INQUIRY_BYTES_MAX), (b"\x10" + number(1)) * 17],
    ids=["a long one", "one of many parts"],
)
async def test_an_inquiry_is_small(raw: bytes) -> None:
    """More than its bounds is refused before it is parsed."""
    reader = Reader(status_pb2.GetStatusRequest, INQUIRY)
    with pytest.raises(InvalidRequest, match="at most"):
        async with Intake(INQUIRY).take(raw, reader):
            pass
