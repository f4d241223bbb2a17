"""The workers there are and the last ones that failed: processes, links, figures.

Invariants:
- Each launch has one record, by its serial number; one owner, the runtime.
- Figures are as old as `figures_s` says: nothing here waits for a worker longer than it was told.
- At most DEAD_WORKERS_MAX failed workers are remembered, the latest of each model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from mlxd.v1 import status_pb2
from mlxd_controller.core.fit import Plan
from mlxd_controller.core.measured import Figures
from mlxd_controller.learning import figures_of, is_news
from mlxd_controller.oom import killed_from_outside
from mlxd_controller.ports import Clock, WorkerLink, WorkerProcess
from mlxd_shared import config
from mlxd_shared.convert import duration_from_pb
from mlxd_shared.errors import MlxdError, WorkerExited, WorkerStartFailed
from mlxd_shared.logs import get_logger
from mlxd_shared.status import RemoteError

DEAD_WORKERS_MAX = 16
ENGINE_STILL_S = 2 * config.STATUS_POLL_S
"""Figures of this age are those of the question before: the engine has not come to the last one."""
POLL_TIMEOUT_S = 5.0
POLL_TIMEOUT_MAX_S = 600.0
CAUSE_WAIT_S = 1.0
_log = get_logger("workers")


@dataclass(slots=True, eq=False)
class Worker:
    """One launch, from its first moment to after its end."""

    number: int
    digest: str
    name: str
    path: str
    plan: Plan
    incarnation: str
    started_unix_s: float
    local: bool = True
    """Whether `process.pid` is a process of this machine."""
    oom_kills: int | None = None
    """How often the kernel had ended a process for want of memory when it was launched."""
    process: WorkerProcess | None = None
    failed_start: WorkerStartFailed | None = None
    """Why there never was a `process`: what is known of one that ended before it listened."""
    link: WorkerLink | None = None
    loading: asyncio.Task[None] | None = None
    ready_s: float | None = None
    """When its model became ready."""
    stopping: bool = False
    error: MlxdError | None = None
    figures: status_pb2.WorkerStatus | None = None
    figures_s: float = 0.0
    told: Figures | None = None
    """What the scheduler knows of them."""
    cpu_s: float = 0.0
    """The most CPU time seen of it: a counter, which does not fall when the process is gone."""
    polling: asyncio.Task[None] | None = field(default=None, repr=False)
    asked_s: float | None = None
    """When it was asked the first question that it has not answered."""
    silent_s: float = 0.0
    """How long it has answered nothing; see `silence`."""
    still_s: float = 0.0
    """How long its engine has stood still."""
    streams: dict[int, None] = field(default_factory=dict)
    """The streams that it was sent and that have not ended, oldest first."""
    streams_sent: int = 0
    ended_because: str = ""
    """Why the controller ends the process while streams run on it; "" if it does not."""

    @property
    def exit_code(self) -> int | None:
        """None while it lives, or never lived."""
        if self.process is not None:
            return self.process.exit_code
        return self.failed_start.code if isinstance(self.failed_start, WorkerExited) else None

    @property
    def stands_still(self) -> bool:
        """Whether its engine is at work at the same thing as at the last question."""
        if self.figures is None or self.loading is not None:
            return False
        return duration_from_pb(self.figures.figures_age) >= ENGINE_STILL_S

    def stream_sent(self) -> int:
        """Note that a stream begins, and return its number."""
        self.streams_sent += 1
        self.streams[self.streams_sent] = None
        return self.streams_sent

    def stream_ended(self, number: int) -> None:
        """Note that a stream has ended, but not by the worker's death: then it counts as one."""
        self.streams.pop(number, None)

    def has_begun(self, number: int) -> bool:
        """Return whether a stream had its turn, as far as rows go by age: it did not just wait."""
        return number in islice(self.streams, self.plan.rows_max)

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of output."""
        if self.process is not None:
            return self.process.last_lines()
        return () if self.failed_start is None else self.failed_start.last_lines

    async def ended(self, *, wait_s: float) -> bool:
        """Return whether its process has ended; wait at most `wait_s` for that."""
        if self.process is None:
            return False
        waiting = asyncio.create_task(self.process.wait_exited())
        await asyncio.wait({waiting}, timeout=wait_s)
        waiting.cancel()
        return self.process.exit_code is not None

    async def cause(self) -> str:
        """Return what ended it, once that is known; "" if it seems to live."""
        await self.ended(wait_s=CAUSE_WAIT_S)
        return "" if self.exit_code is None else self.describe_end(self.exit_code)

    def describe_end(self, code: int) -> str:
        """Return for people why it ended, with this exit code."""
        return self.ended_because or describe_exit(code)

    def was_killed(self, oom_kills: int | None) -> bool:
        """Return whether it was killed for nothing that it did; `oom_kills`: their count by now."""
        if self.ended_because:  # it hung
            return False
        return killed_from_outside(self.exit_code, before=self.oom_kills, now=oom_kills)

    def note_answer(self) -> None:
        """Note that it has answered a question."""
        self.asked_s, self.silent_s = None, 0.0

    def note_figures(self, status: status_pb2.Status, now_s: float) -> None:
        """Keep what the worker says of itself."""
        if status.workers:
            self.figures = status.workers[0]
            self.figures_s = now_s


def describe_exit(code: int) -> str:
    """Return an exit code for people; negative is a signal."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class Workers:
    """All records, and the polling of those that live."""

    def __init__(self, clock: Clock, *, answer_max_s: float = POLL_TIMEOUT_S) -> None:
        """Have no workers; a question is given up after `answer_max_s`."""
        self._clock = clock
        self._answer_max_s = min(max(answer_max_s, POLL_TIMEOUT_S), POLL_TIMEOUT_MAX_S)
        self._live: dict[int, Worker] = {}
        self._dead: dict[str, Worker] = {}

    def add(self, worker: Worker) -> None:
        """Take in a new launch."""
        self._live[worker.number] = worker

    def get(self, number: int) -> Worker | None:
        """Return a worker that lives, or is being started or stopped."""
        return self._live.get(number)

    def live(self) -> tuple[Worker, ...]:
        """Return the workers that are not known to have ended, oldest first."""
        return tuple(self._live.values())

    def dead(self) -> tuple[Worker, ...]:
        """Return the last failed worker of each model, oldest first."""
        return tuple(self._dead.values())

    def news(self) -> list[tuple[int, Figures]]:
        """Return what workers that are ready are newly known to take, each by its number."""
        found: list[tuple[int, Figures]] = []
        for worker in self._live.values():
            if worker.ready_s is None or worker.figures is None:
                continue
            figures = figures_of(worker.figures)
            if figures is not None and is_news(worker.told, figures):
                worker.told = figures
                found.append((worker.number, figures))
        return found

    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the living that are processes of this machine."""
        return tuple(
            worker.process.pid
            for worker in self._live.values()
            if worker.local and worker.process is not None and worker.process.exit_code is None
        )

    def arrays(self) -> dict[int, int]:
        """Return what MLX holds in each worker that has said it, its pool included."""
        return {
            worker.number: figures.memory.mlx_active_bytes + figures.memory.mlx_cache_bytes
            for worker in self._live.values()
            if (figures := worker.figures) is not None
        }

    def end(self, worker: Worker, error: MlxdError | None) -> None:
        """Move a worker that failed to the dead; one that ended as it was told is forgotten."""
        del self._live[worker.number]
        worker.error = error
        if error is None:
            return
        self._dead.pop(worker.digest, None)
        self._dead[worker.digest] = worker
        while len(self._dead) > DEAD_WORKERS_MAX:
            del self._dead[next(iter(self._dead))]

    async def refresh(
        self, workers: Iterable[Worker], *, wait_s: float, recent_s: float = 0.0
    ) -> None:
        """Ask these workers for their figures, and wait at most `wait_s` for the answers.

        Those that gave them less than `recent_s` ago are not asked, and a worker that is still busy
        with an earlier question is not asked again. A bug in the asking is raised here.
        """
        since_s = self._clock.now_s() - recent_s
        asked = [
            task
            for worker in workers
            if (worker.figures is None or worker.figures_s <= since_s)
            and (task := self._ask(worker)) is not None
        ]
        if not asked:
            return
        answered, _ = await asyncio.wait(asked, timeout=wait_s)
        for task in answered:
            task.result()

    def _ask(self, worker: Worker) -> asyncio.Task[None] | None:
        if worker.link is None or worker.loading is not None or worker.stopping:
            return None
        if worker.polling is None or worker.polling.done():
            if worker.asked_s is None:
                worker.asked_s = self._clock.now_s()
            worker.polling = asyncio.create_task(self._poll(worker, worker.link))
        return worker.polling

    async def _poll(self, worker: Worker, link: WorkerLink) -> None:
        try:
            status = await link.status(timeout_s=self._answer_max_s)
        except MlxdError as error:
            if not isinstance(error, RemoteError):
                worker.note_answer()  # it lives, and says what is wrong
            _log.debug("no figures", model=worker.name, reason=error.describe())
            return
        worker.note_answer()
        worker.note_figures(status, self._clock.now_s())
