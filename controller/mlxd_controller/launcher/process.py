"""One worker process: its pipes, its end, its output; what every worker here has in common.

Invariants:
- The end is awaited by one task, so that the process is reaped whoever waits (see `ending`). It
  ends after the output has been read to its end, or EOF_GRACE_S later if another process holds
  the pipe open.
- Its files go with it, however it ended: a process that is killed leaves its socket behind.
- close() is interrupt, WORKER_INTERRUPT_GRACE_S, kill, reap.
- What does not listen yet is terminated instead: it has nothing to end, and Python tells at length
  of an interrupt that meets it while it starts.
"""

from __future__ import annotations

import asyncio
import signal

from structlog.typing import FilteringBoundLogger

from mlxd_controller.launcher.child import Child
from mlxd_controller.launcher.ending import Ending, LocalProcess
from mlxd_controller.launcher.output import Output
from mlxd_controller.launcher.pipes import Pipe, PipeReader
from mlxd_controller.launcher.records import WorkerFiles
from mlxd_shared import config
from mlxd_shared.wire.proof import Proof


class SubprocessWorker(LocalProcess):
    """Implements ports.WorkerProcess over a child of this process."""

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
        self._process = process
        self._life = life
        self._log = log
        self._address = ""
        ending = Ending(asyncio.create_task(self._follow(output)), self._close)
        super().__init__(incarnation, ending, files=files, output=Output(log))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def address(self) -> str:
        """What gRPC dials; empty before the process listens."""
        return self._address

    def listens_on(self, address: str, proof: Proof | None) -> None:
        """Note what the process has told."""
        self._address, self._proof = address, proof

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
        self.files.remove()
        self._log.info("worker ended", pid=self.pid, exit_code=code)
        return code

    async def _close(self) -> int:
        if self._ending.code is None:
            self._process.send_signal(signal.SIGINT if self._address else signal.SIGTERM)
            if not await self._ending.comes_within(config.WORKER_INTERRUPT_GRACE_S):
                self._log.warning("worker did not stop; killing it", pid=self.pid)
                self._process.send_signal(signal.SIGKILL)
        return await self._ending.wait()
