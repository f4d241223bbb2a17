"""One connection of a client: uvicorn's, closed where a request does not come or nobody is there.

Invariants:
- Where no request is under way, a head that has begun has come within HTTP_HEAD_S, and so has the
  first head of a connection; else the connection is closed. uvicorn bounds only the quiet time
  behind an answer. What a client still sends of a body that was refused is bounded so too.
- A client that takes nothing of its answer for HTTP_WRITE_S is cut off, which frees its row.
- A client whose machine has vanished is noticed by the system, though neither side says anything.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxd_gateway.stalls import StallWatch
from mlxd_shared import config
from mlxd_shared.ops.logs import get_logger

_PROBES = 2
_PROBE_S = config.KEEPALIVE_TIMEOUT_MS // 1000 // _PROBES
_QUIET_S = config.KEEPALIVE_TIME_MS // 1000
_log = get_logger("gateway")


class Connection(H11Protocol):
    """A connection over HTTP/1.1."""

    head_s: ClassVar[float] = config.HTTP_HEAD_S
    write_s: ClassVar[float] = config.HTTP_WRITE_S

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **options)
        self._closing: asyncio.TimerHandle | None = None
        """Closes the connection unless a head comes."""
        self._stall: StallWatch | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first head."""
        opened = cast("asyncio.Transport", transport)
        super().connection_made(opened)
        _probe(transport.get_extra_info("socket"))
        self._stall = StallWatch(
            self.loop.call_later, opened.get_write_buffer_size, self._cut_off, limit_s=self.write_s
        )
        self._watch()

    def pause_writing(self) -> None:
        """Write no more for now: the client does not keep up."""
        super().pause_writing()
        assert self._stall is not None, "a connection was made"
        self._stall.begin()

    def resume_writing(self) -> None:
        """Write on."""
        assert self._stall is not None, "a connection was made"
        self._stall.stop()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Read on; wait for the rest of a head that has not come whole."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop()
        if self._stall is not None:
            self._stall.stop()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the rest of what the client has begun; uvicorn waits where it has not."""
        super().on_response_complete()
        begun, _ = self.conn.trailing_data
        if begun or self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def _cut_off(self) -> None:
        """End a connection whose client reads no answer: what is left to send is dropped."""
        _log.warning("a client does not read its answer", peer=self.client, seconds=self.write_s)
        self.transport.abort()

    def _watch(self) -> None:
        """Close the connection by and by, unless a request is under way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._closing is None:
            self._closing = self.loop.call_later(self.head_s, self.transport.close)

    def _stop(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def _probe(endpoint: socket.socket | None) -> None:
    """Have the system ask now and then whether a quiet client is still there."""
    if endpoint is None or endpoint.family == socket.AF_UNIX:
        return
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the first of them, and its own default does.
    for name, value in (
        ("TCP_KEEPIDLE", _QUIET_S), ("TCP_KEEPINTVL", _PROBE_S), ("TCP_KEEPCNT", _PROBES),
    ):  # fmt: skip
        number = getattr(socket, name, None)
        if number is not None:
            endpoint.setsockopt(socket.IPPROTO_TCP, number, value)
