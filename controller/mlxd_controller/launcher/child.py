"""A child process, started and awaited without blocking the event loop, and the pipes to it.

It is started on a thread: the parent is suspended until the child has executed its program, which
takes tens of milliseconds if all processors are busy, and no request would be served. It is reaped
exactly once, by its one `wait`, so that a signal never reaches another process with its id.

The pipes are our own, not asyncio's: asyncio's Process.wait() waits until all its pipes are closed,
and a process that the worker leaves behind can hold one open for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxd_shared import config
from mlxd_shared.ops.known_process import open_handle

READ_LIMIT_BYTES = 64 * config.KIB


class Child:
    """A started process. Methods are for the event loop's thread."""

    def __init__(self, process: subprocess.Popen[bytes], *, handle: int | None) -> None:
        """Await the end of `process`; `handle`, which becomes readable then, is owned."""
        self.pid = process.pid
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        if handle is None:
            name = f"wait for {process.pid}"
            threading.Thread(target=self._wait, name=name, daemon=True).start()
        else:
            self._loop.add_reader(handle, self._readable, handle)

    async def wait(self) -> int:
        """Return the exit code once the process is reaped; negative: a signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing once the process has ended."""
        self._process.send_signal(number)

    def _readable(self, handle: int) -> None:
        self._loop.remove_reader(handle)
        os.close(handle)
        self._ended.set_result(self._process.wait())  # it has ended: this only reaps it

    def _wait(self) -> None:
        code = self._process.wait()
        self._loop.call_soon_threadsafe(self._ended.set_result, code)


async def start(
    command: Sequence[str], *, output: int, pass_fds: Sequence[int], environment: Mapping[str, str]
) -> Child:
    """Start a process in its own session, without input; return it once its program runs.

    output: the descriptor for its output and errors. A cancelled start is still waited for, because
    it uses the caller's descriptors; its process is then ended and reaped.

    Raises:
        OSError: it cannot be started.
    """

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            tuple(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            env=dict(environment),
        )

    starting = asyncio.get_running_loop().run_in_executor(None, begin)
    cancelled: asyncio.CancelledError | None = None
    while not starting.done():
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        process = starting.result()
        return Child(process, handle=open_handle(process.pid))
    if starting.exception() is None:
        process = starting.result()
        process.kill()
        process.wait()  # takes a moment
    raise cancelled


class Pipe:
    """The two ends of a pipe; close() closes those still open."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        """Own both descriptors."""
        self.read_fd, self.write_fd = read_fd, write_fd
        self._open = {read_fd, write_fd}

    def close(self, *fds: int) -> None:
        """Close these ends, or both; an end already closed or given away is left alone."""
        for fd in self._open & set(fds or (self.read_fd, self.write_fd)):
            self._open.remove(fd)
            os.close(fd)

    async def reader(self) -> PipeReader:
        """Give the read end to a reader on the event loop; on cancellation, close it."""
        stream = asyncio.StreamReader(limit=READ_LIMIT_BYTES)
        self._open.remove(self.read_fd)
        connecting = asyncio.ensure_future(
            asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(self.read_fd, "rb", 0)
            )
        )
        # Shielded, because uvloop closes the descriptor twice if this is cancelled, and by the
        # second time it may be in use again.
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
