"""What the scheduler orders and takes time: loads, stops and shrinks, each in a task of its own.

Each task posts one event with its outcome, even on failure. A load that is being stopped posts
nothing: the event for the end of its worker covers it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from mlxd_controller.core import events as ev
from mlxd_controller.core.actions import StartLoad
from mlxd_controller.core.phases import StopReason
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.runtime.loading import end_worker, load_worker
from mlxd_controller.runtime.ports import Ports
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.runtime.workers import Workers
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, WorkerLost
from mlxd_shared.ops.logs import get_logger

_log = get_logger("errands")


class Errands:
    """Carries out orders about workers, in the task group of the runtime, its one owner."""

    def __init__(
        self,
        ports: Ports,
        workers: Workers,
        metrics: Metrics,
        tasks: asyncio.TaskGroup,
        *,
        post: Callable[[ev.Event], None],
        stall_timeout_s: float,
    ) -> None:
        """Report to `post`; a load that makes no progress for `stall_timeout_s` is given up."""
        self._ports = ports
        self._workers = workers
        self._metrics = metrics
        self._tasks = tasks
        self._post = post
        self._stall_timeout_s = stall_timeout_s
        self._identity = os.urandom(4).hex()

    def load(self, action: StartLoad) -> None:
        """Start a load: posts Progressed, then Ready and eventually WorkerDied; or LoadFailed."""
        worker = Worker(
            number=action.worker,
            digest=action.digest,
            name=action.name,
            path=action.path,
            plan=action.plan,
            incarnation=f"{self._identity}-{action.worker}",
            started_unix_s=self._ports.clock.unix_s(),
            local=self._ports.local_workers,
            endable=self._ports.endable_workers,
            oom_kills=self._ports.oom_kills(action.plan.device),
        )
        self._workers.add(worker)
        self._metrics.loads.add(model=action.name, reason=action.reason)
        if action.restart:
            self._metrics.restarts.add(model=action.name, reason=action.restart)
        _log.info(
            "loading",
            model=action.name,
            device=action.plan.device,
            need_bytes=action.plan.need_bytes,
            context_length=action.plan.context_length,
            weights=action.plan.weights.value,
        )
        worker.loading = self._tasks.create_task(self._load(worker, action))

    def learn(self) -> None:
        """Post what is newly known of the memory that ready workers take."""
        for number, figures in self._workers.news():
            self._post(ev.Measured(number, figures))

    async def _load(self, worker: Worker, action: StartLoad) -> None:
        clock = self._ports.clock
        start_s = clock.now_s()
        outcome = "cancelled"
        try:
            await load_worker(
                worker,
                action,
                self._ports,
                stall_timeout_s=self._stall_timeout_s,
                on_progress=lambda step: self._post(ev.Progressed(worker.number, step)),
            )
        except MlxdError as error:
            outcome = "failed"
            lines = worker.last_lines()
            _log.error("load failed", model=worker.name, reason=error.describe(), lines=lines)
            if not worker.stopping:
                self._post(ev.LoadFailed(worker.number, error))
        else:
            outcome = "ready"
            worker.loading = None
            worker.ready_s = clock.now_s()
            self._post(ev.Ready(worker.number))
            self.learn()
            self._tasks.create_task(self.watch(worker))
        finally:
            seconds = clock.now_s() - start_s
            self._metrics.load_seconds.observe(seconds, model=worker.name, outcome=outcome)

    async def watch(self, worker: Worker) -> None:
        """Wait for the end of a ready worker; post WorkerDied unless it is being stopped."""
        assert worker.process is not None
        code = await worker.process.wait_exited()
        if worker.stopping:
            return
        error = WorkerLost(worker.name, cause=worker.describe_end(code))
        _log.error("worker died", model=worker.name, exit_code=code, lines=worker.last_lines())
        worker.stopping = True
        self._post(ev.WorkerDied(worker.number, error))

    async def stop(self, worker: Worker, reason: StopReason) -> None:
        """Stop a worker; post Unloaded once it has ended."""
        self._metrics.evictions.add(model=worker.name, reason=reason.value)
        if worker.ready_s is not None:
            age_s = self._ports.clock.now_s() - worker.ready_s
            self._metrics.age_at_eviction.observe(age_s, model=worker.name, reason=reason.value)
        _log.info("unloading", model=worker.name, reason=reason.value)
        await end_worker(worker)
        self._post(ev.Unloaded(worker.number))

    async def shrink(self, worker: Worker, target_bytes: int) -> None:
        """Ask a worker to release memory; post Shrunk on its answer or timeout."""
        assert worker.link is not None, worker.number
        before_bytes = after_bytes = 0
        try:
            before_bytes, after_bytes = await worker.link.shrink(
                target_bytes, timeout_s=config.SHRINK_TIMEOUT_S
            )
        except MlxdError as error:
            _log.warning("worker did not shrink", model=worker.name, reason=error.describe())
            self._metrics.shrinks.add(model=worker.name, outcome="failed")
        else:
            self._metrics.shrinks.add(model=worker.name, outcome="done")
            gain_bytes = max(0, before_bytes - after_bytes)
            self._metrics.shrunk_bytes.add(gain_bytes, model=worker.name)
            _log.info(
                "shrunk",
                model=worker.name,
                target_bytes=target_bytes,
                before_bytes=before_bytes,
                after_bytes=after_bytes,
            )
        await self._workers.refresh((worker,), wait_s=config.STATUS_POLL_S)
        self._post(ev.Shrunk(worker.number, before_bytes, after_bytes))
