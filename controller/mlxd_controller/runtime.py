"""The one owner of the scheduler's State: mailbox -> decide -> perform -> results come as events.

Invariants:
- State is replaced here and nowhere else, one event at a time, in the order of arrival.
- Performing an action never waits: what takes time runs in a task that posts an event at its end.
- A bug here, or in such a task, ends run() with its exception, and with it the process: requests
  must not wait for answers that nobody will give.
- A worker is among the living until the event that tells of its end is decided on: what is decided
  before that may still name it.
- The mailbox is bounded. New requests are refused when it is half full, so that what ends a request
  always finds room.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mlxd_controller.changes import Changes
from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core.fit import Device
from mlxd_controller.core.placing import no_room, place_of
from mlxd_controller.core.schedule import decide
from mlxd_controller.core.state import Model, Phase, State, StopReason, next_wake_s
from mlxd_controller.loading import end_worker, load_worker, order_of
from mlxd_controller.metrics import Metrics
from mlxd_controller.ports import Clock, Connect, DeviceProbe, Launcher, ModelRef, RawStream
from mlxd_controller.silence import Silence, end_hung
from mlxd_controller.workers import Worker, Workers
from mlxd_shared import config
from mlxd_shared.errors import MlxdError, ModelLoading, QueueFull, ShuttingDown, WorkerLost
from mlxd_shared.logs import get_logger
from mlxd_shared.requests import LoadSpec

WAKE_MIN_S = 0.001
WAKE_MAX_S = 3600.0
LOADING_RETRY_S = 1.0
_log = get_logger("runtime")


@dataclass(slots=True, eq=False)
class Lease:
    """One request's right to use a worker. Whoever holds it reads its streams through it."""

    ticket: str
    model: Model
    worker: Worker
    waited_s: float
    aborted: MlxdError | None = None
    stream: RawStream | None = None

    def abort(self, error: MlxdError) -> None:
        """End the request's stream with `error`; its reader raises it."""
        self.aborted = error
        if self.stream is not None:
            self.stream.cancel()


@dataclass(frozen=True, slots=True)
class Ports:
    """The outside worlds. `local_workers`: this machine's process table tells of the workers."""

    launcher: Launcher
    connect: Connect
    probe: DeviceProbe
    clock: Clock
    local_workers: bool = True


class Runtime:
    """Drives the scheduler. Methods are for the event loop's thread."""

    def __init__(
        self,
        ports: Ports,
        state: State,
        *,
        stall_timeout_s: float,
        silent_max_s: float = config.WORKER_SILENT_MAX_S,
        poll_s: float = config.STATUS_POLL_S,
    ) -> None:
        """Begin with `state`; nothing happens before run(). Workers are asked every `poll_s`."""
        self.workers = Workers(ports.clock, answer_max_s=silent_max_s)
        self.changes = Changes()
        self.metrics = Metrics()
        self._ports = ports
        self._state = state
        self._stall_timeout_s = stall_timeout_s
        self._silence = Silence(ports.clock, silent_max_s=silent_max_s)
        self._poll_s = poll_s
        self._mailbox: asyncio.Queue[ev.Event] = asyncio.Queue(config.MAILBOX_MAX)
        self._answers: dict[str, asyncio.Future[Lease | a.Done]] = {}
        self._leases: dict[str, Lease] = {}
        self._tasks = asyncio.TaskGroup()
        self._identity = os.urandom(4).hex()
        self._tickets = 0
        self._closed = False

    @property
    def state(self) -> State:
        """The state after the last event."""
        return self._state

    def measure(self) -> tuple[Device, ...]:
        """Read the devices and return them; the scheduler learns of it with the next event."""
        devices = self._ports.probe.read(self.workers.pids())
        self.post(ev.MemoryRead(devices))
        return devices

    async def run(self) -> None:
        """Decide and perform until the shutdown is complete: no model resident, all answered.

        Raises:
            ExceptionGroup: a bug; the process should end.
        """
        try:
            async with self._tasks:
                poll = self._tasks.create_task(self._poll())
                while not self._finished():
                    self._step(await self._next())
                poll.cancel()
        finally:
            self._closed = True
            for worker in self.workers.live():  # only after a bug
                await end_worker(worker)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ShuttingDown())

    def post(self, event: ev.Event) -> None:
        """Put an event into the mailbox."""
        self._mailbox.put_nowait(event)

    @asynccontextmanager
    async def lease(
        self, ref: ModelRef, *, keep_alive_s: float | None, timeout_s: float | None
    ) -> AsyncIterator[Lease]:
        """Hold a lease on `ref`'s model, loading it first if need be; released at the exit.

        Raises:
            ModelLoading, NoRoom: not ready within `timeout_s`.
            MlxdError: the scheduler's refusal.
        """
        ticket = self._ticket()
        event = ev.Arrived(ticket, ref.digest, ref.name, str(ref.path), ref.facts, keep_alive_s)
        async with self._asked(event) as answer:
            try:
                async with asyncio.timeout(timeout_s):
                    lease = await asyncio.shield(answer)
            except TimeoutError:
                self._check_loading(ref, ticket)
                lease = await asyncio.shield(answer)  # it is on its way already
            assert isinstance(lease, Lease)
            yield lease

    @asynccontextmanager
    async def loading(
        self, ref: ModelRef, spec: LoadSpec
    ) -> AsyncIterator[asyncio.Future[Lease | a.Done]]:
        """Ask for a load; the future is done when the model is ready, or fails with the reason.

        Leaving does not end the load.
        """
        event = ev.LoadAsked(self._ticket(), ref.digest, ref.name, str(ref.path), ref.facts, spec)
        async with self._asked(event) as answer:
            yield answer

    async def unload(self, digest: str, *, grace_s: float, force: bool) -> int:
        """Unload a model and return how many streams were ended, once it is gone."""
        event = ev.UnloadAsked(self._ticket(), digest, grace_s, force)
        async with self._asked(event) as answer:
            done = await asyncio.shield(answer)
        assert isinstance(done, a.Done)
        return done.streams_aborted

    # --- asking ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asked(
        self, event: ev.Arrived | ev.LoadAsked | ev.UnloadAsked
    ) -> AsyncIterator[asyncio.Future[Lease | a.Done]]:
        if self._closed:
            raise ShuttingDown
        if self._mailbox.qsize() >= config.MAILBOX_MAX // 2:
            raise QueueFull("events", config.MAILBOX_MAX // 2)
        answer = asyncio.get_running_loop().create_future()
        self._answers[event.ticket] = answer
        self.post(event)
        try:
            yield answer
        finally:
            self._answers.pop(event.ticket, None)
            self._leases.pop(event.ticket, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # read, so that nobody is told it never was
            self.post(ev.Released(event.ticket, event.digest))

    def _ticket(self) -> str:
        self._tickets += 1
        return f"t{self._tickets}"

    def _check_loading(self, ref: ModelRef, ticket: str) -> None:
        """Raise why there is no lease yet, if the scheduler has `ticket` wait for its model."""
        model = self._state.models.get(ref.digest)
        if model is not None and any(waiter.ticket == ticket for waiter in model.waiters):
            if model.stuck:
                raise no_room(self._state, model, place_of(self._state, model)) from None
            raise ModelLoading(ref.name, LOADING_RETRY_S, model.progress.fraction) from None

    # --- deciding --------------------------------------------------------------------------------

    def _finished(self) -> bool:
        return self._state.stopping and not self.workers.live() and self._mailbox.empty()

    async def _next(self) -> ev.Event:
        delay_s = next_wake_s(self._state) - self._ports.clock.now_s()
        try:
            async with asyncio.timeout(min(max(delay_s, WAKE_MIN_S), WAKE_MAX_S)):
                return await self._mailbox.get()
        except TimeoutError:
            return ev.Tick()

    def _step(self, event: ev.Event) -> None:
        if self._may_start_a_load(event):
            self._decide(ev.MemoryRead(self._ports.probe.read(self.workers.pids())))
        self._decide(event)
        match event:
            case ev.LoadFailed(number, error) | ev.WorkerDied(number, error):
                self._bury(number, error)
            case ev.Unloaded(number):
                self._bury(number, None)
            case _:
                pass

    def _may_start_a_load(self, event: ev.Event) -> bool:
        match event:
            case ev.Arrived() | ev.LoadAsked():
                model = self._state.models.get(event.digest)
                return model is None or model.phase in (Phase.UNLOADED, Phase.FAILED)
            case ev.Ready() | ev.Unloaded() | ev.LoadFailed() | ev.WorkerDied():
                return True
            case ev.MemoryRead() | ev.Progressed():
                return False
            case _:
                return self._queues()

    def _queues(self) -> bool:
        return any(model.phase is Phase.QUEUED for model in self._state.models.values())

    def _decide(self, event: ev.Event) -> None:
        before = self._state
        self._state, wanted = decide(before, event, self._ports.clock.now_s())
        for action in wanted:
            self._perform(action)
        for digest, model in self._state.models.items():
            former = before.models.get(digest)
            if former is not model:
                self.changes.publish(former, model)

    def _bury(self, number: int, error: MlxdError | None) -> None:
        """Let a worker that has ended be one of the dead, unless it is being stopped just now."""
        worker = self.workers.get(number)
        if worker is None or self._state.by_worker(number) is not None:
            return  # its Unloaded comes after this
        self.workers.end(worker, error)
        if worker.link is not None:
            self._tasks.create_task(worker.link.close())

    # --- performing ------------------------------------------------------------------------------

    def _perform(self, action: a.Action) -> None:
        match action:
            case a.StartLoad():
                self._start_load(action)
            case a.StopWorker(number, _, reason):
                self._tasks.create_task(self._stop(number, reason))
            case a.AbortStreams(tickets, error):
                for lease in (self._leases[t] for t in tickets if t in self._leases):
                    lease.abort(error)
            case a.Grant(ticket, number, waited_s):
                self._grant(ticket, number, waited_s)
            case a.Done(ticket):
                if (answer := self._unanswered(ticket)) is not None:
                    answer.set_result(action)
            case a.Refuse(ticket, error):
                if (answer := self._unanswered(ticket)) is not None:
                    answer.set_exception(error)

    def _unanswered(self, ticket: str) -> asyncio.Future[Lease | a.Done] | None:
        """Return where a request waits; None if it has gone and its Released is on its way."""
        answer = self._answers.get(ticket)
        return None if answer is None or answer.done() else answer

    def _grant(self, ticket: str, number: int, waited_s: float) -> None:
        answer = self._unanswered(ticket)
        if answer is None:
            return
        worker = self.workers.get(number)
        assert worker is not None, number
        if waited_s > 0:
            self.metrics.cold_starts.add(model=worker.name)
        lease = Lease(ticket, self._state.models[worker.digest], worker, waited_s)
        self._leases[ticket] = lease
        answer.set_result(lease)

    def _start_load(self, action: a.StartLoad) -> None:
        worker = Worker(
            number=action.worker,
            digest=action.digest,
            name=action.name,
            path=action.path,
            plan=action.plan,
            incarnation=f"{self._identity}-{action.worker}",
            started_unix_s=self._ports.clock.unix_s(),
            local=self._ports.local_workers,
        )
        self.workers.add(worker)
        self.metrics.loads.add(model=action.name, reason=action.reason)
        if action.restart:
            self.metrics.restarts.add(model=action.name, reason=action.restart)
        _log.info(
            "loading",
            model=action.name,
            need_bytes=action.plan.need_bytes,
            context_length=action.plan.context_length,
            weights=action.plan.weights.value,
        )
        worker.loading = self._tasks.create_task(self._load(worker, action))

    async def _load(self, worker: Worker, action: a.StartLoad) -> None:
        clock = self._ports.clock
        begun_s = clock.now_s()
        outcome = "cancelled"
        try:
            await load_worker(
                worker,
                order_of(action),
                launcher=self._ports.launcher,
                connect=self._ports.connect,
                clock=clock,
                stall_timeout_s=self._stall_timeout_s,
                on_progress=lambda step: self.post(ev.Progressed(worker.number, step)),
            )
        except MlxdError as error:
            outcome = "failed"
            lines = worker.last_lines()
            _log.error("load failed", model=worker.name, reason=error.describe(), lines=lines)
            if not worker.stopping:
                self.post(ev.LoadFailed(worker.number, error))
        else:
            outcome = "ready"
            worker.loading = None
            worker.ready_s = clock.now_s()
            self.post(ev.Ready(worker.number))
            self._tasks.create_task(self._watch(worker))
        finally:
            seconds = clock.now_s() - begun_s
            self.metrics.load_seconds.observe(seconds, model=worker.name, outcome=outcome)

    async def _watch(self, worker: Worker) -> None:
        assert worker.process is not None
        code = await worker.process.wait_exited()
        if worker.stopping:
            return
        error = WorkerLost(worker.name, cause=worker.describe_end(code))
        _log.error("worker died", model=worker.name, exit_code=code, lines=worker.last_lines())
        worker.stopping = True
        self.post(ev.WorkerDied(worker.number, error))

    async def _stop(self, number: int, reason: StopReason) -> None:
        worker = self.workers.get(number)
        assert worker is not None, number
        self.metrics.evictions.add(model=worker.name, reason=reason.value)
        if worker.ready_s is not None:
            age_s = self._ports.clock.now_s() - worker.ready_s
            self.metrics.age_at_eviction.observe(age_s, model=worker.name, reason=reason.value)
        _log.info("unloading", model=worker.name, reason=reason.value)
        await end_worker(worker)
        self.post(ev.Unloaded(worker.number))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            if self._queues():
                self.measure()  # others may have given back what it waits for
            await self.workers.refresh(self.workers.live(), wait_s=self._poll_s)
            for worker in self._silence.hung(self.workers.live()):
                self._tasks.create_task(end_hung(worker))
