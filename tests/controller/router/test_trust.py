"""Who may call a router's door: this machine, and networks that the operator names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd_controller.router.trust import Trust, TrustInterceptor
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.health import Health
from mlxd_shared.wire.admission import AdmissionInterceptor
from mlxd_shared.wire.interceptors import ErrorInterceptor
from mlxd_shared.wire.status import RemoteError
from tests.support.calls import error_of

TRUST = Trust.of(["10.1.0.0/16", "fd00::/8", "192.168.0.9"])
PEERS = [
    ("ipv4:127.0.0.1:5", True),
    ("ipv6:%5B::1%5D:5", True),
    ("ipv4:10.1.2.3:5", True),
    ("ipv6:%5B::ffff:10.1.2.3%5D:5", True),
    ("ipv6:%5Bfd00::7%5D:5", True),
    ("ipv4:192.168.0.9:5", True),
    ("ipv4:192.168.0.10:5", False),
    ("ipv4:10.2.0.1:5", False),
    ("ipv6:%5Bfe80::1%25eth0%5D:5", False),
    ("unix:", False),
    ("", False),
    ("ipv4:nonsense", False),
]


@pytest.mark.parametrize(("peer", "may"), PEERS)
def test_a_caller_is_known_by_its_address(peer: str, *, may: bool) -> None:
    """As gRPC names it; an IPv4 address within IPv6 is the same machine."""
    assert TRUST.allows(peer) is may


def test_without_networks_only_this_machine_may_call() -> None:
    """Loopback, and nothing else."""
    assert Trust().allows("ipv4:127.0.0.1:5")
    assert not Trust().allows("ipv4:10.1.2.3:5")


ADDRESSES = [
    ("0.0.0.0:1", (), "--router-network"),
    ("10.1.0.1:1", (), "--router-network"),
    ("unix:/tmp/x", (), "a port of its own"),
]


@pytest.mark.parametrize(("address", "networks", "problem"), ADDRESSES)
def test_an_open_address_needs_networks(
    address: str, networks: tuple[str, ...], problem: str
) -> None:
    """The refusal says what is missing."""
    with pytest.raises(InvalidRequest, match=problem):
        Trust.of(networks).check(parse_address(address))


def test_an_address_with_networks_is_served() -> None:
    """And loopback without any."""
    TRUST.check(parse_address("0.0.0.0:1"))
    Trust().check(parse_address("127.0.0.1:1"))


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "office", ""])
def test_what_is_no_network_is_refused(text: str) -> None:
    """By the option's name."""
    with pytest.raises(InvalidRequest, match="router_network"):
        Trust.of([text])


@pytest.mark.asyncio
async def test_a_stranger_reaches_no_method(tmp_path: Path) -> None:
    """Neither kind, nor one that is not there: over a Unix socket nobody's network is known."""
    server = grpc.aio.server(interceptors=[TrustInterceptor(Trust())])
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for call in (stub.Check, stub.Watch):
            error = await error_of(call(health_pb2.HealthCheckRequest()))
            assert isinstance(error, RemoteError)
            assert error.code is grpc.StatusCode.PERMISSION_DENIED
        unknown: Any = channel.unary_unary("/a.B/C")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await server.stop(0)


@pytest.mark.asyncio
async def test_a_stranger_is_refused_before_sending_anything(tmp_path: Path) -> None:
    """So calls that are opened and left take no places from those who may call."""
    places = AdmissionInterceptor(0, asks=lambda _: False)
    server = grpc.aio.server(interceptors=[TrustInterceptor(Trust()), places])
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        opening: Any = channel.stream_stream("/grpc.health.v1.Health/Check")
        assert await opening(timeout=20.0).code() is grpc.StatusCode.PERMISSION_DENIED
    await server.stop(0)


@pytest.mark.asyncio
async def test_who_is_trusted_is_served_as_without_the_door() -> None:
    """Answers, streams and errors alike; a call without a request is refused, not kept waiting."""
    health = Health()
    server = grpc.aio.server(interceptors=[TrustInterceptor(Trust()), ErrorInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        own, unknown = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckRequest(service="x")
        served = await stub.Check(own)
        assert (await anext(aiter(stub.Watch(own)))) == served
        error = await error_of(stub.Check(unknown))
        assert isinstance(error, RemoteError)
        assert error.code is grpc.StatusCode.NOT_FOUND
        empty: Any = channel.stream_stream("/grpc.health.v1.Health/Check")
        call = empty(timeout=20.0)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        method: Any = channel.unary_unary("/a.B/C")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)
