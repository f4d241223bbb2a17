"""Pipes between the controller and a child, each end owned by exactly one place.

Our own pipes, not asyncio's: Process.wait() there waits until every pipe that asyncio made is
closed, and a process that the worker leaves behind can hold one open for ever.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from mlxd_shared import config

READ_LIMIT_BYTES = 64 * config.KIB


class Pipe:
    """The two ends of a pipe; what is still open is closed by close()."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        """Own both descriptors."""
        self.read_fd, self.write_fd = read_fd, write_fd
        self._open = {read_fd, write_fd}

    def close(self, *fds: int) -> None:
        """Close these ends, or both; what is closed or given away already is left alone."""
        for fd in self._open & set(fds or (self.read_fd, self.write_fd)):
            self._open.remove(fd)
            os.close(fd)

    async def reader(self) -> PipeReader:
        """Give the read end away to a reader on the event loop; cancelled, close it."""
        stream = asyncio.StreamReader(limit=READ_LIMIT_BYTES)
        self._open.remove(self.read_fd)
        connecting = asyncio.ensure_future(
            asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(self.read_fd, "rb", 0)
            )
        )
        # Not to be cancelled itself: uvloop then closes the descriptor twice, the second time
        # perhaps another process's.
        try:
            transport, _ = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_close)
            raise
        return PipeReader(stream, transport)


_Connected = asyncio.Future[tuple[asyncio.ReadTransport, asyncio.StreamReaderProtocol]]


def _close(connected: _Connected) -> None:
    if not connected.cancelled() and connected.exception() is None:
        transport, _ = connected.result()
        transport.close()


@dataclass(frozen=True, slots=True)
class PipeReader:
    """The read end of a pipe on the event loop."""

    stream: asyncio.StreamReader
    _transport: asyncio.ReadTransport

    def close(self) -> None:
        """Close the read end; idempotent."""
        self._transport.close()
