"""One worker that others started: what it reports, who uses it, and when it is lost.

Invariants:
- A worker's last report is at most WATCH_INTERVAL_S old, or it is silent. A worker that cannot be
  reached for LOST_AFTER_S, or returns as another process, has ended for its user here. So has one
  that reports nothing for SILENCE_S_MAX, nor on a new watch for LOST_AFTER_S. It has time for a
  restart before it counts as lost itself.
- A worker serves one model at a time. Taking it and giving it back are single steps of the event
  loop, so that no two loads take the same worker.
- Giving a worker back unloads its model, unless the controller is leaving: the next controller then
  finds the model loaded.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from mlxd_controller.launcher.attached_link import UNLOAD_TIMEOUT_S
from mlxd_controller.launcher.process import END_UNKNOWN, EndingProcess
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.runtime.ports import Holding
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import ProcessStatus, WorkerFigures
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.secure_channel import ChannelSecurity
from mlxd_shared.wire.proof import Proof

WATCH_INTERVAL_S = 1.0
SILENCE_S_MAX = 10.0
"""A worker silent for this long counts as gone: it reports every WATCH_INTERVAL_S."""
LOST_AFTER_S = 2.0
RETRY_S = 0.2

_log = get_logger("attached")


class AttachedProcess(EndingProcess):
    """Implements ports.WorkerProcess for as long as one model uses an attached worker.

    `pid` is its process id on its own machine, which may be another one.
    """

    proof: Proof | None = None
    """None: an attached worker gives its proof only to whoever started it."""

    def __init__(self, station: Station, worker: WorkerFigures) -> None:
        super().__init__(worker.incarnation, asyncio.get_running_loop().create_future())
        self.pid = worker.pid
        self.address = station.address
        self._station = station

    def remember(self, holding: Holding | None) -> None:
        """Do nothing: an attached worker itself reports what it holds."""

    def note_lost(self, reason: str) -> None:
        """Note that the process has gone; its output consists of this alone, ours to see or not."""
        self.output.add(f"worker {self._station.name} at {self.address}: {reason}")
        self._end(END_UNKNOWN)

    async def _close(self) -> int:
        if not self._ended.done():
            await self._station.unload(self.incarnation)
            self._end(0)
        return self._ended.result()

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)
            self._station.give_back(self)


class Station:
    """One attached worker: the connection, its last report, and its user."""

    def __init__(
        self,
        name: str,
        address: str,
        security: ChannelSecurity,
        changed: asyncio.Event,
        *,
        silence_s_max: float = SILENCE_S_MAX,
        restart_s: float,
    ) -> None:
        """Set up the worker; `follow` connects. `changed` is pulsed at any news."""
        self.name = name
        self.address = address
        self.status: ProcessStatus | None = None
        self.last: ProcessStatus | None = None
        """The last report, even of a silent worker."""
        self.present = False
        """Whether it has reported, and has not been silent for LOST_AFTER_S since."""
        self.lost = False
        """Whether it has reported, and has been silent for `restart_s` since."""
        self.keeps_model = False
        self.problem = "it has not answered yet"
        self.process: AttachedProcess | None = None
        self._changed = changed
        self._silent_since_s = 0.0
        self._heard_s = 0.0
        self._silence_s_max = silence_s_max
        self._security = security
        self._restart_s = restart_s
        self._link = self._link_to("")  # to whichever process listens there

    @property
    def figures(self) -> WorkerFigures | None:
        """The worker's last figures; None while it is silent."""
        return self.status.workers[0] if self.status is not None else None

    @property
    def is_gone(self) -> bool:
        """Whether it is silent, but has reported before."""
        return self.status is None and self.last is not None

    @property
    def patience_s(self) -> float:
        """How long to wait for the first report on a new watch.

        Short for a silent worker that still counts as present: if it lives it answers at once.
        """
        return LOST_AFTER_S if self.present and self.is_gone else self._silence_s_max

    def take(self) -> AttachedProcess:
        """Take the worker, which must be free and not silent."""
        figures = self.figures
        assert self.process is None
        assert figures is not None
        self.process = AttachedProcess(self, figures)
        return self.process

    def give_back(self, process: AttachedProcess) -> None:
        """Make the worker available again."""
        assert self.process is process
        self.process = None
        self._pulse()

    async def unload(self, incarnation: str) -> None:
        """Unload the model, whatever it is doing; keep it if the controller is leaving.

        A worker that cannot be reached keeps its model until the next load on its machine.
        """
        if self.keeps_model:
            return
        link = self._link_to(incarnation)
        try:
            await link.unload(timeout_s=UNLOAD_TIMEOUT_S)
        except MlxdError as error:
            _log.warning("cannot unload", worker=self.name, reason=error.describe())
        finally:
            await link.close()

    async def follow(self) -> None:
        """Watch the worker until cancelled."""
        self._heard_s = asyncio.get_running_loop().time()
        while True:
            try:
                await self._watch()
                self._fall_silent("it is stopping")
            except TimeoutError:
                silent_s = asyncio.get_running_loop().time() - self._heard_s
                self._fall_silent(f"it reported nothing for {silent_s:.0f} s")
            except MlxdError as error:
                self._fall_silent(error.describe())
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Close the connection; for its remaining user the worker is lost."""
        if self.process is not None:
            self.process.note_lost("the controller has released it")
        await self._link.close()

    async def _watch(self) -> None:
        limit_s = self.patience_s
        async with aclosing(self._link.watch(interval_s=WATCH_INTERVAL_S)) as statuses:
            while True:
                status = await hear(anext(statuses, None), limit_s=limit_s)
                if status is None:
                    return
                self._hear(status)
                limit_s = self._silence_s_max

    def _link_to(self, incarnation: str) -> GrpcLink:
        return GrpcLink(
            address=self.address, incarnation=incarnation, digest="", security=self._security
        )

    def _hear(self, status: ProcessStatus) -> None:
        known = self.figures
        if not status.workers:
            return
        self.status = self.last = status
        self._heard_s = asyncio.get_running_loop().time()
        self.present, self.lost = True, False
        figures = status.workers[0]
        if self.process is not None and self.process.incarnation != figures.incarnation:
            self.process.note_lost("it was restarted")
        if known is None or known.incarnation != figures.incarnation:
            _log.info("worker found", worker=self.name, address=self.address,
                      incarnation=figures.incarnation, model=figures.model_name)  # fmt: skip
        self._pulse()

    def _fall_silent(self, problem: str) -> None:
        now_s = asyncio.get_running_loop().time()
        was_heard = self.status is not None
        if was_heard:
            self._silent_since_s = now_s
        # Logged once per kind: gRPC's details differ from one attempt to the next.
        is_other = problem.partition(":")[0] != self.problem.partition(":")[0]
        if was_heard or is_other:
            _log.warning("worker is silent", worker=self.name, reason=problem)
        self.status, self.problem = None, problem
        if was_heard:
            self._pulse()
        silent_s = now_s - self._silent_since_s
        if self.last is None or silent_s < LOST_AFTER_S:
            return
        self.present = False
        if self.process is not None:
            self.process.note_lost(problem)
        if silent_s >= self._restart_s and not self.lost:
            self.lost = True
            self._pulse()

    def _pulse(self) -> None:
        self._changed.set()
        self._changed.clear()
