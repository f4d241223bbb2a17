"""The one owner of the scheduler's State: mailbox -> decide -> perform -> results come as events.

Invariants:
- State is replaced only here, one event at a time, in the order of arrival; requests that need
  what nobody has described yet are put off until it is.
- Performing an action never waits: what takes time runs in a task that posts an event at its end.
  A bug in such a task ends run(), and with it the process: requests must not wait in vain.
- A worker counts as live until the event of its end has been decided: earlier decisions may still
  name it.
- New requests are refused once the mailbox is half full, so that events that end requests find
  room.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core.phases import Cold, Loading, Queued, Ready
from mlxd_controller.core.placement.queueing import no_room, place_of
from mlxd_controller.core.schedule import decide
from mlxd_controller.core.state import Model, State, next_wake_s
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.runtime.adoption import leave_word
from mlxd_controller.runtime.changes import Changes, same_but_measured
from mlxd_controller.runtime.describing import PutOff
from mlxd_controller.runtime.errands import Errands
from mlxd_controller.runtime.loading import end_worker
from mlxd_controller.runtime.measuring import Measuring
from mlxd_controller.runtime.ports import ModelRef, Ports, RawStream
from mlxd_controller.runtime.silence import Silence, end_hung
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.runtime.workers import Workers
from mlxd_models.fit.facts import Division
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.domain import errors as e
from mlxd_shared.domain.figures import HostMemory
from mlxd_shared.domain.requests import LoadSpec

WAKE_MIN_S = 0.001
WAKE_MAX_S = 3600.0
LOADING_RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class Lease:
    """One request's right to use a worker. Its holder reads its stream through it."""

    ticket: str
    model: Model
    worker: Worker
    waited_s: float
    aborted: e.MlxdError | None = None
    stream: RawStream | None = None

    def abort(self, error: e.MlxdError) -> None:
        """End the request's stream with `error`; its reader raises it."""
        self.aborted = error
        if self.stream is not None:
            self.stream.cancel()


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
        """Begin with `state`; nothing happens before run(). Workers are polled every `poll_s`."""
        self.workers = Workers(ports.clock, answer_max_s=silent_max_s)
        self.changes = Changes()
        self.metrics = Metrics()
        self._ports = ports
        self._state = state
        self._measuring = Measuring(ports.probe, self.workers, ports.clock)
        self._silence = Silence(ports.clock, silent_max_s=silent_max_s)
        self._poll_s = poll_s
        self._mailbox: asyncio.Queue[ev.Event] = asyncio.Queue(config.MAILBOX_MAX)
        self._answers: dict[str, asyncio.Future[Lease | a.Done]] = {}
        self._undecided: dict[str, ev.Arrived | ev.LoadAsked] = {}
        self._put_off = PutOff(self.post)
        self._leases: dict[str, Lease] = {}
        self._tasks = asyncio.TaskGroup()
        self._errands = Errands(
            ports,
            self.workers,
            self.metrics,
            self._tasks,
            post=self.post,
            stall_timeout_s=stall_timeout_s,
        )
        # Requests that waited for one model resume one by one, and others are served in between.
        self._turnstile = asyncio.Lock()
        self._tickets = (f"t{number}" for number in itertools.count(1))
        self._closed = False

    @property
    def state(self) -> State:
        """The state after the last event."""
        return self._state

    def in_use(self) -> frozenset[str]:
        """Return the digests and paths of all models that are pinned, or not unloaded.

        Includes models of requests that the scheduler has not decided on yet.
        """
        models = self._state.models.values()
        known = [(m.digest, m.path) for m in models if m.pinned or not isinstance(m.phase, Cold)]
        requests = [(event.digest, event.path) for event in self._undecided.values()]
        return frozenset(text for texts in (*known, *requests) for text in texts)

    def adopt(self, workers: Iterable[tuple[Worker, ev.Adopted]]) -> None:
        """Own these workers of an earlier controller; call before run() and any request."""
        for worker, event in workers:
            self.workers.add(worker)
            self.post(event)

    def measure(self) -> tuple[Device, ...]:
        """Measure the devices and return them; the scheduler gets the figures as an event."""
        event = self._measuring.now()
        self.post(event)
        return event.devices

    def may_have_died_of(self, lease: Lease) -> bool:
        """Return whether a lease's stream may have caused the end of its worker.

        It did not if it only waited behind the worker's rows, or if somebody killed the worker.
        """
        if lease.stream is None or not lease.worker.has_begun(lease.stream):
            return False
        worker = lease.worker
        return not worker.was_killed(self._ports.oom_kills(worker.plan.device))

    def measure_devices(self) -> tuple[Device, ...]:
        """Return a recent measurement of the devices, or measure them now."""
        return self._measuring.recent() or self.measure()

    def machines(self) -> tuple[HostMemory, ...]:
        """Return the memory of the workers' machines; () means this machine."""
        return self._ports.probe.machines()

    async def run(self) -> None:
        """Decide and perform until the shutdown is complete: no model resident, all answered.

        Raises:
            ExceptionGroup: a bug; the process should end.
        """
        try:
            async with self._tasks:
                poll = self._tasks.create_task(self._poll())
                for worker in self.workers.live():  # adopted, and not decided on yet
                    self._tasks.create_task(self._errands.watch(worker))
                while not (
                    self._state.stopping and not self.workers.live() and self._mailbox.empty()
                ):
                    await self._step(await self._next())
                    await asyncio.sleep(0)  # let others run, even in a burst of events
                poll.cancel()
        finally:
            self._closed = True
            for worker in self.workers.live():  # only after a bug
                await end_worker(worker)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(e.ShuttingDown())

    def post(self, event: ev.Event) -> None:
        """Put an event into the mailbox."""
        self._mailbox.put_nowait(event)

    @asynccontextmanager
    async def lease(
        self, ref: ModelRef, *, keep_alive_s: float | None, timeout_s: float | None
    ) -> AsyncIterator[Lease]:
        """Hold a lease on `ref`'s model, loading it first if need be; released at the exit.

        Raises:
            ModelLoading, ModelDraining, NoRoom: not ready for it within `timeout_s`.
            MlxdError: the scheduler's refusal.
        """
        ticket = next(self._tickets)
        place = (ticket, ref.digest, ref.name, str(ref.path), ref.facts)
        event = ev.Arrived(*place, keep_alive_s, ref.configured)
        async with self._ask(event) as answer:
            try:
                async with asyncio.timeout(timeout_s):
                    lease = await asyncio.shield(answer)
            except TimeoutError:
                self._check_loading(ref, ticket)
                lease = await asyncio.shield(answer)  # it is on its way already
            assert isinstance(lease, Lease)
            async with self._turnstile:
                await asyncio.sleep(0)
            yield lease

    @asynccontextmanager
    async def loading(
        self, ref: ModelRef, spec: LoadSpec
    ) -> AsyncIterator[asyncio.Future[Lease | a.Done]]:
        """Ask for a load; the future is done when the model is ready, or fails with the reason.

        Leaving does not end the load.
        """
        ticket = next(self._tickets)
        place = (ticket, ref.digest, ref.name, str(ref.path), ref.facts)
        event = ev.LoadAsked(*place, spec, ref.configured)
        async with self._ask(event) as answer:
            yield answer

    async def unload(self, digest: str, *, grace_s: float, force: bool) -> int:
        """Unload a model and return how many streams were ended, once it is gone."""
        event = ev.UnloadAsked(next(self._tickets), digest, grace_s, force)
        async with self._ask(event) as answer:
            done = await asyncio.shield(answer)
        assert isinstance(done, a.Done)
        return done.streams_aborted

    @asynccontextmanager
    async def _ask(
        self, event: ev.Arrived | ev.LoadAsked | ev.UnloadAsked
    ) -> AsyncIterator[asyncio.Future[Lease | a.Done]]:
        if self._closed:
            raise e.ShuttingDown
        if self._mailbox.qsize() >= config.MAILBOX_MAX // 2:
            raise e.QueueFull("events", config.MAILBOX_MAX // 2)
        answer = asyncio.get_running_loop().create_future()
        self._answers[event.ticket] = answer
        self.post(event)
        if not isinstance(event, ev.UnloadAsked):
            self._undecided[event.ticket] = event
        try:
            yield answer
        finally:
            self._answers.pop(event.ticket, None)
            self._leases.pop(event.ticket, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # retrieved, so that asyncio does not report it as lost
            self.post(ev.Released(event.ticket, event.digest))

    def _check_loading(self, ref: ModelRef, ticket: str) -> None:
        """Raise why there is no lease yet, if `ticket` still waits for its model."""
        model = self._state.models.get(ref.digest)
        if model is None or all(waiter.ticket != ticket for waiter in model.waiters):
            return
        match model.phase:
            case Queued(stuck=True) as queued:
                position = place_of(self._state, queued)
                raise no_room(self._state, model, queued, position) from None
            case Ready():  # held for another model that waits
                raise e.ModelDraining(ref.name) from None
            case Loading(progress=progress):
                raise e.ModelLoading(ref.name, LOADING_RETRY_S, progress.fraction) from None
            case _:
                raise e.ModelLoading(ref.name, LOADING_RETRY_S, 0.0) from None

    async def _next(self) -> ev.Event:
        delay_s = next_wake_s(self._state) - self._ports.clock.now_s()
        try:
            async with asyncio.timeout(min(max(delay_s, WAKE_MIN_S), WAKE_MAX_S)):
                return await self._mailbox.get()
        except TimeoutError:
            return ev.Tick()

    async def _step(self, event: ev.Event) -> None:
        if self._measuring.due(self._state, event):
            await self._decide(self._measuring.now())
        if not await self._decide(event):
            return
        match event:
            case ev.Arrived(ticket) | ev.LoadAsked(ticket):
                self._undecided.pop(ticket, None)
            case ev.LoadFailed(number, error) | ev.WorkerDied(number, error):
                self._bury(number, error)
            case ev.Unloaded(number):
                self._bury(number, None)
            case ev.UnloadAsked(digest=digest):
                self.workers.drop_dead(digest)
            case _:
                pass

    async def _decide(self, event: ev.Event) -> bool:
        """Decide an event and perform what follows; return False for a request that was put off.

        It is decided later. Another event that needs what ranks have of a model waits for it here,
        and the mailbox with it: what follows may not be decided before.
        """
        before = self._state
        state, actions = decide(before, event, self._ports.clock.now_s())
        match actions:
            case (a.DescribeRanks(division),):
                request = event if isinstance(event, ev.Arrived | ev.LoadAsked) else None
                if request is not None and request.facts.division is division:
                    self._put_off_for(division, request)
                    return False
                await division.describe()
                return await self._decide(event)
            case _:
                pass
        self._state = state
        for action in actions:
            self._perform(action)
        for digest, model in self._state.models.items():
            former = before.models.get(digest)
            if former is not model and not same_but_measured(former, model):
                self.changes.publish(former, model)
                worker = None if model.worker is None else self.workers.get(model.worker)
                leave_word(worker, former, model, keep_alive_s=self._state.keep_alive_s)
        return True

    def _put_off_for(self, division: Division, request: ev.Arrived | ev.LoadAsked) -> None:
        if self._put_off.add(division, request):
            describing = self._put_off.describe(division, still_wanted=self._is_wanted)
            self._tasks.create_task(describing)

    def _is_wanted(self, ticket: str) -> bool:
        """Return whether a request that was put off is still there; else it is forgotten."""
        if ticket in self._answers:
            return True
        self._undecided.pop(ticket, None)
        return False

    def _bury(self, number: int, error: e.MlxdError | None) -> None:
        """Move a worker that has ended to the dead, unless it is just being stopped."""
        worker = self.workers.get(number)
        if worker is None or self._state.by_worker(number) is not None:
            return  # its Unloaded comes after this
        self.workers.end(worker, error)
        if worker.link is not None:
            self._tasks.create_task(worker.link.close())

    def _perform(self, action: a.Action) -> None:
        match action:
            case a.StartLoad():
                self._errands.load(action)
            case a.StopWorker(number, _, reason):
                self._tasks.create_task(self._errands.stop(self.workers[number], reason))
            case a.Shrink(number, _, target_bytes):
                self._tasks.create_task(self._errands.shrink(self.workers[number], target_bytes))
            case a.AbortStreams(tickets, error):
                for lease in (self._leases[t] for t in tickets if t in self._leases):
                    lease.abort(error)
            case a.Grant() | a.Done() | a.Refuse():
                answer = self._answers.get(action.ticket)
                if answer is not None and not answer.done():  # otherwise its Released is on its way
                    self._answer(answer, action)

    def _answer(
        self, answer: asyncio.Future[Lease | a.Done], action: a.Grant | a.Done | a.Refuse
    ) -> None:
        match action:
            case a.Refuse(_, error):
                answer.set_exception(error)
            case a.Done():
                answer.set_result(action)
            case a.Grant(ticket, number, waited_s):
                worker = self.workers[number]
                if waited_s > 0:
                    self.metrics.cold_starts.add(model=worker.name)
                lease = Lease(ticket, self._state.models[worker.digest], worker, waited_s)
                self._leases[ticket] = lease
                answer.set_result(lease)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.workers.refresh(self.workers.live(), wait_s=self._poll_s)
            if self._state.models:
                self.measure()  # others may have taken memory, or given it back
            self._errands.learn()
            self._silence.note_round(self.workers.live())
            for worker, problem in self._silence.find_hung(self.workers.live()):
                worker.ended_because = problem
                self._tasks.create_task(end_hung(worker))
