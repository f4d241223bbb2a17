"""A worker's process, our child or adopted: watched to its end, and ended.

Invariants:
- All waiters see the same end, and cancelling one affects no other. Closing runs once, however many
  callers ask for it, and no cancellation of a caller undoes it.
- A child has ended once it is reaped and its output is read, or EOF_GRACE_S later if another
  process holds the pipe open. A process that is not our child ends with END_UNKNOWN.
- A worker's files are removed however it ended: a killed worker leaves its socket behind.
- A signal reaches exactly that process, or none.
"""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mlxd_controller.launcher.child import Child, Pipe, PipeReader
from mlxd_controller.launcher.output import Output
from mlxd_controller.launcher.records import Record, WorkerFiles
from mlxd_controller.runtime.kept_lines import KeptLines
from mlxd_controller.runtime.ports import Holding
from mlxd_shared import config
from mlxd_shared.ops.known_process import KnownProcess
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.proof import Proof

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

END_UNKNOWN = 255
"""The exit code of a worker whose end we could not observe."""
END_S_MAX = 10.0
"""How long the system may take to end a killed process."""
_log = get_logger("launcher")


class EndingProcess(ABC):
    """The common part of all implementations of ports.WorkerProcess: an identity, and one end."""

    def __init__(self, incarnation: str, ended: asyncio.Future[int]) -> None:
        """Set the identity; the result of `ended` is the exit code."""
        self.incarnation = incarnation
        self.output = KeptLines()
        ended.add_done_callback(lambda _: self.output.close())
        self._ended = ended
        self._closing: asyncio.Task[int] | None = None

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: a signal; END_UNKNOWN: not observed."""
        return self._ended.result() if self._ended.done() else None

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of output that were read, oldest first."""
        return self.output.last(config.LAST_LINES_MAX)

    async def wait_exited(self) -> int:
        """Return the exit code once the process has ended and, if a child, is reaped."""
        return await asyncio.shield(self._ended)

    async def close(self) -> int:
        """End it, or give it back, once for all callers; return the exit code."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return await asyncio.shield(self._closing)

    @abstractmethod
    async def _close(self) -> int: ...


class LocalProcess(EndingProcess):
    """A process on this machine that one of our controllers started, with its files and output."""

    def __init__(self, incarnation: str, *, files: WorkerFiles, log: FilteringBoundLogger) -> None:
        """Own `files`; `_follow` starts in the next turn of the event loop."""
        super().__init__(incarnation, asyncio.create_task(self._follow()))
        self.files = files
        self.proof: Proof | None = None
        self._log = log
        self._forwarding = Output(log, self.output)

    def remember(self, holding: Holding | None) -> None:
        """Rewrite its record; see the port."""
        if self.exit_code is None:
            self.files.holds(holding, self.proof)

    @abstractmethod
    async def _follow(self) -> int:
        """Return the exit code once it has ended, its output is read and its files are removed."""

    async def ends_within(self, limit_s: float) -> bool:
        """Wait at most `limit_s` for the end; return whether it has come."""
        await asyncio.wait({self._ended}, timeout=limit_s)
        return self._ended.done()


class SubprocessWorker(LocalProcess):
    """A child of this process. close() is interrupt, WORKER_INTERRUPT_GRACE_S, kill, reap.

    Before it listens it is terminated instead: it has nothing to finish, and an interrupt during
    its start would make Python print a long traceback.
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
        """Take over `process`, its output and files, and the pipe that shows it that we live."""
        super().__init__(incarnation, files=files, log=log)
        self.pid = process.pid
        self.address = ""
        """The address for gRPC; empty until the process listens."""
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
    """A process identified by its mark. close() is interrupt, grace, kill, or giving up."""

    def __init__(self, known: KnownProcess, record: Record, files: WorkerFiles) -> None:
        """Take over `known`, which `record` describes, and `files`; inside the event loop."""
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
        """Read the worker's output from a named pipe, whose path `adopt` sends to the worker.

        Raises what `adopt` raises, and OSError if there can be no pipe; nothing is read then.
        """
        path = self.files.output
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Our own writer until the worker opens it: a pipe without writers reads as ended.
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
            self._log.error("worker cannot be ended", pid=self.pid)
            self._known.close()
            self._gone.set()
        return await self.wait_exited()
