"""Addresses, and servers that listen on them."""

from __future__ import annotations

import asyncio
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.net import CHANNEL_OPTIONS, SERVER_OPTIONS, is_loopback, parse_address
from mlxd_shared.serving.server import Health, listen, make_server


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="mlxd-") as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("text", "target", "loopback"),
    [
        ("127.0.0.1:8555", "127.0.0.1:8555", True),
        ("tcp:127.0.0.1:0", "127.0.0.1:0", True),
        ("127.1.2.3:1", "127.1.2.3:1", True),
        ("localhost:80", "localhost:80", True),
        ("[::1]:80", "[::1]:80", True),
        ("0.0.0.0:80", "0.0.0.0:80", False),
        ("[::]:80", "[::]:80", False),
        ("10.0.0.7:65535", "10.0.0.7:65535", False),
        ("example.org:80", "example.org:80", False),
        ("localhost.example.org:80", "localhost.example.org:80", False),
        ("unix:/run/x", "unix:/run/x", True),
    ],
)
def test_an_address_knows_whether_it_is_loopback(text: str, target: str, *, loopback: bool) -> None:
    """Only what cannot be reached from elsewhere is loopback; a name that is not known is not."""
    address = parse_address(text)

    assert (address.target, address.loopback) == (target, loopback)
    assert address.is_unix is text.startswith("unix:")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        ":80",
        "host:",
        "host:65536",
        "host:-1",
        "host:٣",
        "unix:",
        "tcp:80",
        "h:" + "9" * 5000,
    ],
)
def test_a_bad_address_is_refused_by_name(text: str) -> None:
    """The error names the field and says what an address looks like."""
    with pytest.raises(InvalidRequest) as caught:
        parse_address(text)

    assert caught.value.violations[0].field == "address"


def test_a_socket_path_has_a_bound() -> None:
    """sun_path holds 104 bytes on macOS with its end: bytes count, not characters."""
    longest = "unix:/" + "x" * (config.UNIX_PATH_BYTES_MAX - 1)

    assert parse_address(longest).path == Path(longest.removeprefix("unix:"))
    with pytest.raises(InvalidRequest, match="1 to 103 bytes, this one 104"):
        parse_address(longest + "x")
    with pytest.raises(InvalidRequest, match="this one 104"):
        parse_address(longest[:-1] + "é")


def test_is_loopback_takes_hosts_only() -> None:
    """A host without its port and brackets."""
    assert is_loopback("::1")
    assert not is_loopback("fe80::1")


def test_both_ends_agree_on_the_size_of_a_message() -> None:
    """An answer that a server may send, its client may receive; a request is refused earlier."""
    sent, received = "grpc.max_send_message_length", "grpc.max_receive_message_length"
    assert dict(SERVER_OPTIONS)[sent] == dict(CHANNEL_OPTIONS)[received] == 64 << 20
    assert dict(SERVER_OPTIONS)[received] == config.RELAYED_REQUEST_BYTES_MAX
    assert config.RELAYED_REQUEST_BYTES_MAX > config.REQUEST_BYTES_MAX


async def health_over(target: str) -> int:
    """Ask the server at `target` how it is."""
    async with grpc.aio.insecure_channel(target, options=list(CHANNEL_OPTIONS)) as channel:
        check: Any = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=""))
    return int(answer.status)


@pytest.mark.asyncio
async def test_a_unix_socket_is_private_and_replaces_a_stale_one(folder: Path) -> None:
    """The folder is the user's alone, what a dead server left is removed, and clients connect."""
    path = folder / "run" / "s"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    fresh = folder / "fresh" / "s"
    for place in (path, fresh):
        server, health = make_server(health_of := Health(), ()), health_of
        await health.set("", serving=True)
        target = listen(server, parse_address(f"unix:{place}"))
        await server.start()

        assert await health_over(target) == health_pb2.HealthCheckResponse.SERVING
        await server.stop(None)

    assert stat.S_IMODE(fresh.parent.stat().st_mode) == 0o700


@pytest.mark.asyncio
async def test_port_0_is_told_and_taken_ports_are_refused() -> None:
    """The caller learns the port that the system chose; nobody else can take it."""
    first, second = make_server(Health(), ()), make_server(Health(), ())
    target = listen(first, parse_address("127.0.0.1:0"))
    await first.start()

    assert not target.endswith(":0")
    with pytest.raises(InvalidRequest, match="cannot listen on"):
        listen(second, parse_address(target))
    await first.stop(None)


@pytest.mark.asyncio
async def test_only_loopback_unless_asked() -> None:
    """A server that others can reach must be asked for by name."""
    with pytest.raises(InvalidRequest, match="--allow-remote"):
        listen(make_server(Health(), ()), parse_address("0.0.0.0:0"))

    server = make_server(Health(), ())
    assert listen(server, parse_address("0.0.0.0:0"), anywhere=True).startswith("0.0.0.0:")
    await server.start()
    await server.stop(None)


class SlowRelay:
    """Passes bytes on to a server, but holds back what it first says for a while."""

    def __init__(self, port: int, *, hold_s: float) -> None:
        self._port = port
        self._hold_s = hold_s
        self.ended = asyncio.Event()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        may_speak = asyncio.Event()
        asyncio.get_running_loop().call_later(self._hold_s, may_speak.set)

        async def answer() -> None:
            await may_speak.wait()
            await pump(from_server, writer)

        await asyncio.gather(pump(reader, to_server), answer())
        self.ended.set()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until either side ends."""
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.asyncio
async def test_a_server_that_is_slow_to_answer_is_waited_for() -> None:
    """A busy or far server needs longer than one back-off for its part of the handshake."""
    health_of = Health()
    await health_of.set("", serving=True)
    server = make_server(health_of, ())
    target = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    hold_s = 4 * config.RECONNECT_BACKOFF_MIN_MS / 1000
    slow = SlowRelay(int(target.rpartition(":")[2]), hold_s=hold_s)
    relay = await asyncio.start_server(slow.relay, "127.0.0.1", 0)
    port = relay.sockets[0].getsockname()[1]

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())

    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    relay.close()
    await server.stop(None)
    await slow.ended.wait()
    await relay.wait_closed()
