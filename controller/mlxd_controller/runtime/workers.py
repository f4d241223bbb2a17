"""The live workers and the last ones that failed: processes, links, figures.

Each launch has one record, under its serial number; one owner, the runtime. At most
DEAD_WORKERS_MAX failed workers are remembered, the latest of each model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from mlxd_controller.runtime.ports import Clock, WorkerLink
from mlxd_controller.runtime.worker import Worker
from mlxd_models.fit.measured import Figures
from mlxd_shared.config import MIB
from mlxd_shared.domain.devices import DeviceKind, kind_of
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import WorkerFigures
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.status import RemoteError

DEAD_SHOWN_S = 600.0
"""How long a failure is shown, unless its model is unloaded first."""
DEAD_WORKERS_MAX = 16
POLL_TIMEOUT_S = 5.0
POLL_TIMEOUT_MAX_S = 600.0
WEIGHTS_ACCOUNT = "weights"
PREFIX_RELOAD_S_MAX = 3600.0
"""More than any prompt takes: a worker's word is no reason to keep its model for ever."""
NEWS_BYTES = MIB
"""The scheduler is told once figures have grown by this much."""
_log = get_logger("workers")


class Workers:
    """All records, and the polling of the live workers."""

    def __init__(self, clock: Clock, *, answer_max_s: float = POLL_TIMEOUT_S) -> None:
        """Start without workers; a poll is given up after `answer_max_s`."""
        self._clock = clock
        self._answer_max_s = min(max(answer_max_s, POLL_TIMEOUT_S), POLL_TIMEOUT_MAX_S)
        self._live: dict[int, Worker] = {}
        self._dead: dict[str, Worker] = {}

    def add(self, worker: Worker) -> None:
        """Record a new launch."""
        self._live[worker.number] = worker

    def __getitem__(self, number: int) -> Worker:
        """Return a worker that lives, or is being started or stopped; there must be one."""
        return self._live[number]

    def get(self, number: int) -> Worker | None:
        """Return a worker if it lives, or is being started or stopped."""
        return self._live.get(number)

    def live(self) -> tuple[Worker, ...]:
        """Return the workers that are not known to have ended, oldest first."""
        return tuple(self._live.values())

    def dead(self) -> tuple[Worker, ...]:
        """Return the last failed worker of each model, oldest first, for DEAD_SHOWN_S."""
        since_s = self._clock.now_s() - DEAD_SHOWN_S
        self._dead = {d: worker for d, worker in self._dead.items() if worker.ended_s >= since_s}
        return tuple(self._dead.values())

    def last_of(self, digest: str) -> Worker | None:
        """Return a model's worker, or else the last one that failed, for DEAD_SHOWN_S."""
        living = [worker for worker in self._live.values() if worker.digest == digest]
        dead = [worker for worker in self.dead() if worker.digest == digest]
        return next(reversed([*dead, *living]), None)

    def drop_dead(self, digest: str) -> None:
        """Forget a model's failed worker: somebody has seen to the model."""
        self._dead.pop(digest, None)

    def news(self) -> Iterator[tuple[int, Figures]]:
        """Yield the memory figures of ready workers that are news to the scheduler."""
        for worker in self._live.values():
            if worker.ready_s is None or worker.figures is None:
                continue
            figures = figures_of(worker.figures)
            if figures is not None and is_news(worker.last_figures, figures):
                worker.last_figures = figures
                yield worker.number, figures

    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the live workers on this machine, with all their ranks."""
        return tuple(
            pid
            for worker in self._live.values()
            if worker.local and worker.process is not None and worker.process.exit_code is None
            for pid in worker.pids(worker.process)
        )

    def arrays(self) -> dict[int, int]:
        """Return what MLX holds in each worker that has reported it, its pool included."""
        return {
            worker.number: figures.memory.mlx_nbytes
            for worker in self._live.values()
            if (figures := worker.figures) is not None
        }

    def prefix_reloads(self) -> dict[int, float]:
        """Return what prompts would cost again after a reload, of each worker that has said it."""
        return {
            worker.number: min(max(figures.prefix_reload_s, 0.0), PREFIX_RELOAD_S_MAX)
            for worker in self._live.values()
            if (figures := worker.figures) is not None and figures.prefix_reload_s
        }

    def measure(self) -> None:
        """Record the system's figures of each live process on this machine."""
        for worker in self._live.values():
            worker.note_process()

    def end(self, worker: Worker, error: MlxdError | None) -> None:
        """Move a failed worker to the dead; forget one that ended as ordered."""
        del self._live[worker.number]
        worker.error, worker.ended_s = error, self._clock.now_s()
        if error is None:
            return
        self._dead.pop(worker.digest, None)
        self._dead[worker.digest] = worker
        while len(self._dead) > DEAD_WORKERS_MAX:
            del self._dead[next(iter(self._dead))]

    async def refresh(
        self, workers: Iterable[Worker], *, wait_s: float, recent_s: float = 0.0
    ) -> None:
        """Poll these workers for their figures, and wait at most `wait_s` for the answers.

        Workers that answered less than `recent_s` ago, or that are still busy with an earlier
        question, are not asked again. A bug in the polling is raised here.
        """
        since_s = self._clock.now_s() - recent_s
        polls = [
            task
            for worker in workers
            if (worker.figures is None or worker.figures_s <= since_s)
            and (task := self._ask(worker)) is not None
        ]
        if not polls:
            return
        answered, _ = await asyncio.wait(polls, timeout=wait_s)
        for task in answered:
            task.result()

    def _ask(self, worker: Worker) -> asyncio.Task[None] | None:
        if worker.link is None or worker.loading is not None or worker.stopping:
            return None
        if worker.polling is None or worker.polling.done():
            worker.attention.note_question(self._clock.now_s())
            worker.polling = asyncio.create_task(self._poll(worker, worker.link))
        return worker.polling

    async def _poll(self, worker: Worker, link: WorkerLink) -> None:
        try:
            status = await link.status(timeout_s=self._answer_max_s)
        except MlxdError as error:
            if not isinstance(error, RemoteError):
                worker.attention.note_answer()  # it lives, and reports what is wrong
            _log.debug("no figures", model=worker.name, reason=error.describe())
            return
        worker.attention.note_answer()
        worker.note_status(status, self._clock.now_s())


def figures_of(worker: WorkerFigures) -> Figures | None:
    """Return the memory that a worker with a model takes; None if it reports none."""
    memory = worker.memory
    weights = sum(a.nbytes for a in memory.accounts if a.name == WEIGHTS_ACCOUNT)
    if not weights:
        return None
    # Beside the arrays, and only where they are part of the process's resident set.
    on_cpu = kind_of(worker.backend) is DeviceKind.CPU
    return Figures(
        weights=weights,
        peak=memory.mlx_peak_nbytes,
        process=max(memory.resident_nbytes - memory.mlx_nbytes, 0) if on_cpu else 0,
    )


def is_news(before: Figures | None, now: Figures) -> bool:
    """Return whether the scheduler, which knows `before`, should hear of `now`."""
    if before is None:
        return True
    grown = max(now.peak - before.peak, now.process - before.process)
    return grown >= NEWS_BYTES or now.weights != before.weights
