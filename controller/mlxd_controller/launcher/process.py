"""A worker's process: seen to its end, and ended. Our child, or one that a former controller left.

Invariants:
- Every waiter waits for the same end, and one that is cancelled takes it from no other. Closing
  runs once, however many ask for it, and no cancellation of a caller undoes it.
- A child has ended when it is reaped and its output is read, or EOF_GRACE_S later where another
  process holds the pipe open. A process that is no child of ours ends with END_UNKNOWN.
- A worker's files go with it, however it ended: one that is killed leaves its socket behind.
- A signal goes to that very process, or to none.
"""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from structlog.typing import FilteringBoundLogger

from mlxd_controller.launcher.child import Child, Pipe, PipeReader
from mlxd_controller.launcher.output import Output
from mlxd_controller.launcher.records import Record, WorkerFiles
from mlxd_controller.runtime.kept_lines import KeptLines
from mlxd_controller.runtime.ports import Holding
from mlxd_shared import config
from mlxd_shared.ops.known_process import KnownProcess
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.proof import Proof

END_UNKNOWN = 255
"""The exit code of a worker whose end was not ours to see."""
END_S_MAX = 10.0
"""What the system may take to end a process that was killed."""
_log = get_logger("launcher")


class EndingProcess(ABC):
    """What every implementation of ports.WorkerProcess has: an identity, and one end."""

    def __init__(self, incarnation: str, ended: asyncio.Future[int]) -> None:
        """Name the process; the result of `ended` is its exit code."""
        self.incarnation = incarnation
        self.output = KeptLines()
        ended.add_done_callback(lambda _: self.output.close())
        self._ended = ended
        self._closing: asyncio.Task[int] | None = None

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: a signal; END_UNKNOWN: not ours to see."""
        return self._ended.result() if self._ended.done() else None

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of output that were read, oldest first."""
        return self.output.last(config.LAST_LINES_MAX)

    async def wait_exited(self) -> int:
        """Return the exit code once it has ended, and is reaped where it is a child."""
        return await asyncio.shield(self._ended)

    async def close(self) -> int:
        """End it, or give it back, once for all callers; return the exit code."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return await asyncio.shield(self._closing)

    @abstractmethod
    async def _close(self) -> int: ...


class LocalProcess(EndingProcess):
    """A process on this machine that a controller of ours started: its files, its output."""

    def __init__(self, incarnation: str, *, files: WorkerFiles, log: FilteringBoundLogger) -> None:
        """Own `files`; `_follow` begins with the next turn of the event loop."""
        super().__init__(incarnation, asyncio.create_task(self._follow()))
        self.files = files
        self.proof: Proof | None = None
        self._log = log
        self._forwarding = Output(log, self.output)

    def remember(self, holding: Holding | None) -> None:
        """Write its record anew; see the port."""
        if self.exit_code is None:
            self.files.holds(holding, self.proof)

    @abstractmethod
    async def _follow(self) -> int:
        """Return the exit code once it has ended, its output is read and its files are gone."""

    async def ends_within(self, limit_s: float) -> bool:
        """Wait for the end, `limit_s` at most; return whether it has come."""
        await asyncio.wait({self._ended}, timeout=limit_s)
        return self._ended.done()


class SubprocessWorker(LocalProcess):
    """A child of this process. close() is interrupt, WORKER_INTERRUPT_GRACE_S, kill, reap.

    Before it listens it is terminated instead: it has nothing to end, and Python tells at length of
    an interrupt that meets it while it starts.
    """

    def __init__(
        self,
        process: Child,
        *,
        incarnation: str,
        output: PipeReader,
        life: Pipe,
        files: WorkerFiles,
        log: FilteringBoundLogger,
    ) -> None:
        """Take over `process`, its output and files, and the pipe by which it knows we live."""
        super().__init__(incarnation, files=files, log=log)
        self.pid = process.pid
        self.address = ""
        """What gRPC dials; empty before the process listens."""
        self._process = process
        self._reader = output
        self._life = life

    async def _follow(self) -> int:
        reading = asyncio.create_task(self._forwarding.follow(self._reader.stream))
        code = await self._process.wait()
        await asyncio.wait({reading}, timeout=config.EOF_GRACE_S)
        if not reading.done():
            self._log.warning("output still open after the worker's end", pid=self.pid)
            reading.cancel()
            await asyncio.wait({reading})
        self._reader.close()
        self._life.close()
        self.files.remove()
        self._log.info("worker ended", pid=self.pid, exit_code=code)
        return code

    async def _close(self) -> int:
        if self.exit_code is None:
            self._process.send_signal(signal.SIGINT if self.address else signal.SIGTERM)
            if not await self.ends_within(config.WORKER_INTERRUPT_GRACE_S):
                self._log.warning("worker did not stop; killing it", pid=self.pid)
                self._process.send_signal(signal.SIGKILL)
        return await self.wait_exited()


class AdoptedWorker(LocalProcess):
    """A process that is known by its mark. close() is interrupt, a grace, kill, or giving it up."""

    def __init__(self, known: KnownProcess, record: Record, files: WorkerFiles) -> None:
        """Take over `known`, of which `record` tells, and `files`; inside the event loop."""
        log = _log.bind(incarnation=record.incarnation)
        super().__init__(record.incarnation, files=files, log=log)
        self.pid = known.mark.pid
        self.address = files.address
        self.proof = record.proof
        self._known = known
        self._reading: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        known.watch(self._gone.set)

    async def take_over(self, adopt: Callable[[str], Awaitable[None]]) -> None:
        """Have `adopt` tell the worker of a named pipe for its output, and read from that.

        Raises what `adopt` raises, and OSError where there can be no pipe; nothing is read then.
        """
        path = self.files.output
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # A writer of our own until the worker is one: a pipe without any seems to be at its end.
        pipe = Pipe(os.open(path, os.O_RDONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY))
        try:
            await adopt(str(path))
            self._reading = asyncio.create_task(self._read(await pipe.reader()))
        finally:
            pipe.close()
            path.unlink(missing_ok=True)

    async def _read(self, reader: PipeReader) -> None:
        try:
            await self._forwarding.follow(reader.stream)
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
            await self.ends_within(wait_s)
        if not self._gone.is_set():
            self._log.error("worker does not end", pid=self.pid)
            self._known.close()
            self._gone.set()
        return await self.wait_exited()
