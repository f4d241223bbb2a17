"""One worker process: its pipes, its end, its output. Used by the subprocess launcher.

Invariants:
- The end is awaited by one task; every waiter waits for that task, so all see the same end, and the
  process is reaped whoever waits. It ends after the output has been read to its end, or EOF_GRACE_S
  later where somebody else holds the pipe open.
- Its files go with it, however it ended: a process that is killed leaves its socket behind.
- close() is interrupt, WORKER_INTERRUPT_GRACE_S, kill, reap. It runs once, however often and by
  however many it is called, and is not undone by the cancellation of a caller.
- What does not listen yet is terminated instead: it has nothing to end, and Python tells at length
  of an interrupt that meets it while it starts.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import Process

from structlog.typing import FilteringBoundLogger

from mlxd_controller.launcher.output import Output
from mlxd_controller.launcher.pipes import Pipe, PipeReader
from mlxd_controller.launcher.records import WorkerFiles
from mlxd_controller.ports import Holding
from mlxd_shared import config


class SubprocessWorker:
    """Implements ports.WorkerProcess over asyncio's subprocess."""

    def __init__(
        self,
        process: Process,
        *,
        incarnation: str,
        output: PipeReader,
        life: Pipe,
        files: WorkerFiles,
        log: FilteringBoundLogger,
    ) -> None:
        """Take over `process`, its output and files, and the pipe by which it knows we live."""
        self._process = process
        self._incarnation = incarnation
        self._life = life
        self._files = files
        self._log = log
        self._address = ""
        self._output = Output(log)
        self._ended = asyncio.create_task(self._follow(output))
        self._closing: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def address(self) -> str:
        """What gRPC dials; empty before the process listens."""
        return self._address

    @property
    def incarnation(self) -> str:
        """The identity given at launch."""
        return self._incarnation

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: a signal."""
        return self._ended.result() if self._ended.done() else None

    def listens_on(self, address: str) -> None:
        """Note the address that the process has told."""
        self._address = address

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of output, oldest first."""
        return self._output.last_lines()

    def remember(self, holding: Holding | None) -> None:
        """Write its record anew; see the port."""
        if not self._ended.done():
            self._files.holds(holding)

    async def wait_exited(self) -> int:
        """Return the exit code once the process has ended and is reaped."""
        return await asyncio.shield(self._ended)

    async def close(self) -> int:
        """End the process; see the file's invariants."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return await asyncio.shield(self._closing)

    async def _follow(self, output: PipeReader) -> int:
        reading = asyncio.create_task(self._output.follow(output.stream))
        code = await self._process.wait()
        await asyncio.wait({reading}, timeout=config.EOF_GRACE_S)
        if not reading.done():
            self._log.warning("output still open after the worker's end", pid=self.pid)
            reading.cancel()
            await asyncio.wait({reading})
        output.close()
        self._life.close()
        self._files.remove()
        self._log.info("worker ended", pid=self.pid, exit_code=code)
        return code

    async def _close(self) -> int:
        if self._ended.done():
            return self._ended.result()
        self._signal(signal.SIGINT if self._address else signal.SIGTERM)
        await asyncio.wait({self._ended}, timeout=config.WORKER_INTERRUPT_GRACE_S)
        if not self._ended.done():
            self._log.warning("worker did not stop; killing it", pid=self.pid)
            self._signal(signal.SIGKILL)
        return await self._ended

    def _signal(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            self._log.debug("worker ended before its signal", pid=self.pid)
