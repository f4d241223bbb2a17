"""Addresses, and the channel and server options that both ends agree on."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.chats import half_character
from mlxd_shared.domain.errors import InvalidRequest

Options = Sequence[tuple[str, int]]
PORT_MAX = 65535


def keepalive(*, time_ms: int, timeout_ms: int) -> Options:
    """Return options that end a connection whose peer has said nothing for the sum of both times.

    gRPC asks with a ping, and a ping's own time-out, a minute by default, tells of a peer that has
    stopped; the one that is named after keepalive counts only where it is the shorter one.
    """
    return (
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )


_COMMON: Options = (
    ("grpc.max_send_message_length", config.MESSAGE_BYTES_MAX),
    *keepalive(time_ms=config.KEEPALIVE_TIME_MS, timeout_ms=config.KEEPALIVE_TIMEOUT_MS),
)

# Of what is longer gRPC reads no more than the length.
SERVER_OPTIONS: Options = (
    *_COMMON,
    ("grpc.max_receive_message_length", config.RELAYED_REQUEST_BYTES_MAX),
    ("grpc.keepalive_permit_without_calls", 1),
    # With gRPC's own five minutes, clients that ask as often as ours are hung up on once a stream
    # was silent for three, as it is while a long prompt is read.
    ("grpc.http2.min_ping_interval_without_data_ms", config.KEEPALIVE_PING_INTERVAL_MIN_MS),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", config.HANDSHAKE_TIMEOUT_MS),
    # Calls that the server has not taken yet. gRPC cancels calls at random from the first figure
    # on, all of them from the second, and those that waited longer than the third; no caller learns
    # why. By default they are 1,000, 3,000 and 30 s (decision 0044).
    ("grpc.server.max_pending_requests", config.PENDING_CALLS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", config.PENDING_CALLS_MAX),
    ("grpc.server_max_unrequested_time_in_server", config.PENDING_CALL_MAX_S),
)

# For strangers, not for a worker's one controller, whose questions would wait behind its streams.
# What a client begins beyond the bound waits in the client. With its "overload protection" gRPC
# counts a stream until the server has let go of it, which is later than its client knows of the
# end: a client at the bound would have calls refused without a word (decision 0044).
CLIENTS_OPTIONS: Options = (
    ("grpc.max_concurrent_streams", config.STREAMS_PER_CONNECTION_MAX),
    ("grpc.http.overload_protection", 0),
)

# A worker that restarts must be reached at once: the default back-off costs seconds. The "min" one
# is no back-off, for all its name: gRPC gives each attempt to connect, handshakes and all, so long.
CHANNEL_OPTIONS: Options = (
    *_COMMON,
    ("grpc.max_receive_message_length", config.MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", config.RECONNECT_BACKOFF_MIN_MS),
    ("grpc.min_reconnect_backoff_ms", config.CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", config.RECONNECT_BACKOFF_MAX_MS),
    # By default all channels of a process to one server share a connection, and its streams.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: `unix:PATH` or `HOST:PORT`; port 0 lets the system choose."""

    target: str
    loopback: bool

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return self.target.startswith("unix:")

    @property
    def path(self) -> Path:
        """The socket's path; only for Unix sockets."""
        assert self.is_unix
        return Path(self.target.removeprefix("unix:"))


def parse_address(text: str) -> Address:
    """Return the address in `text`: `unix:PATH`, `tcp:HOST:PORT` or `HOST:PORT`.

    Raises:
        InvalidRequest: naming what is wrong and the limit.
    """
    problem = half_character(text)
    if problem:
        raise InvalidRequest.of("address", problem)
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        length = len(path.encode())
        if not path or length > config.UNIX_PATH_BYTES_MAX:
            limit = (
                f"a socket's path has 1 to {config.UNIX_PATH_BYTES_MAX} bytes, this one {length}"
            )
            raise InvalidRequest.of("address", limit)
        return Address(text, loopback=True)
    target = text.removeprefix("tcp:")
    host, colon, port = target.rpartition(":")
    digits = port.isascii() and port.isdecimal() and len(port) <= len(str(PORT_MAX))
    number = int(port) if digits else -1
    if not colon or not host or not 0 <= number <= PORT_MAX:
        raise InvalidRequest.of(
            "address", f"{text!r:.200} is not unix:PATH or HOST:PORT (0 to {PORT_MAX})"
        )
    return Address(target, loopback=is_loopback(host.strip("[]")))


def is_loopback(host: str) -> bool:
    """Return whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
