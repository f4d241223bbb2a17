"""A child process, started and awaited without holding up the event loop.

It is started on a thread: until a child has become another program its parent stands still, and
where all processors are busy that is tens of milliseconds, in which no request would be served. It
is reaped once, by its one `wait`, so that a signal never reaches another process of its id.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from mlxd_shared.ops.known_process import open_handle


class Child:
    """A process that was started. Methods are for the event loop's thread."""

    def __init__(self, process: subprocess.Popen[bytes], *, handle: int | None) -> None:
        """Await the end of `process`; `handle`, if any, becomes readable then, and is owned."""
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
        """Return the exit code once it has ended and is reaped; negative: a signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; one that has ended takes none."""
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
    """Start a process in a session of its own, without input; return it once it is the program.

    output: the descriptor that its output and errors go to. A start that is cancelled is waited for
    all the same, because it uses the caller's descriptors; its process is then ended and reaped.

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
        process.wait()  # a moment
    raise cancelled
