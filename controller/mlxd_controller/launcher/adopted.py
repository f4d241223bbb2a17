"""A worker that a former controller started: watched, read and ended though it is no child.

Invariants:
- The exit code is not ours to see, and told as END_UNKNOWN.
- A signal goes to that very process, or to none.
- However its end comes, its files go with it.
- close() is interrupt, a grace, kill. One that cannot be ended is let go of.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from mlxd_controller.launcher.ending import END_UNKNOWN, Ending, LocalProcess
from mlxd_controller.launcher.output import Output
from mlxd_controller.launcher.pipes import Pipe, PipeReader
from mlxd_controller.launcher.records import Record, WorkerFiles
from mlxd_shared import config
from mlxd_shared.ops.known_process import KnownProcess
from mlxd_shared.ops.logs import get_logger

END_S_MAX = 10.0
"""What the system may take to end a process that was killed."""
_log = get_logger("launcher")


class AdoptedWorker(LocalProcess):
    """Implements ports.WorkerProcess over a process that is known by its mark."""

    def __init__(self, known: KnownProcess, record: Record, files: WorkerFiles) -> None:
        """Take over `known`, of which `record` tells, and `files`; inside the event loop."""
        self._known = known
        self._log = _log.bind(incarnation=record.incarnation)
        self._reading: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        known.watch(self._gone.set)
        ending = Ending(asyncio.create_task(self._follow()), self._close)
        super().__init__(record.incarnation, ending, files=files, output=Output(self._log))
        self._proof = record.proof

    @property
    def pid(self) -> int:
        """The process id."""
        return self._known.mark.pid

    @property
    def address(self) -> str:
        """What gRPC dials."""
        return self.files.address

    async def take_over(self, adopt: Callable[[str], Awaitable[None]]) -> None:
        """Have `adopt` tell the worker of a named pipe for its output, and read from that.

        Raises what `adopt` raises, and OSError where there can be no pipe; nothing is read then.
        """
        path = self.files.output
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # A writer of our own until the worker is one: a pipe without any seems to be at its end.
        pipe = Pipe.from_ends(
            os.open(path, os.O_RDONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY)
        )
        try:
            await adopt(str(path))
            self._reading = asyncio.create_task(self._read(await pipe.reader()))
        finally:
            pipe.close()
            path.unlink(missing_ok=True)

    async def _read(self, reader: PipeReader) -> None:
        try:
            await self._output.follow(reader.stream)
        finally:
            reader.close()

    async def _follow(self) -> int:
        await self._gone.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=config.EOF_GRACE_S)
            self._reading.cancel()
            await asyncio.wait({self._reading})
        self.files.remove()
        self._log.info("worker ended", pid=self.pid)
        return END_UNKNOWN

    async def _close(self) -> int:
        interrupt = (signal.SIGINT, config.WORKER_INTERRUPT_GRACE_S)
        for number, wait_s in (interrupt, (signal.SIGKILL, END_S_MAX)):
            if self._gone.is_set():
                break
            self._known.send_signal(number)
            await self._ending.comes_within(wait_s)
        if not self._gone.is_set():
            self._log.error("worker does not end", pid=self.pid)
            self._known.close()
            self._gone.set()
        return await self._ending.wait()
