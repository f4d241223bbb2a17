"""A seeded world around the scheduler core: clients, operators, workers, memory and their faults.

Invariants:
- One seed is one history: every choice is drawn from one generator, in the order of events.
- The world keeps the edge's promises (every StartLoad and StopWorker is answered in the end), and
  breaks all else: news are lost, late, doubled; workers crash, hang, run out of memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.schedule import decide
from mlxd_controller.core.state import State, next_wake_s
from mlxd_shared.domain.errors import WorkerExited, WorkerLost, WorkerTimedOut
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from tests.simulation.books import Books, Process, Request, Stage
from tests.simulation.checks import Checks
from tests.simulation.former import begin_with_former_workers
from tests.simulation.machines import Machines
from tests.simulation.memory import Memory
from tests.simulation.settings import (
    EVENTS,
    LOAD_S_MAX,
    STALL_S,
    STOP_S_MAX,
    setting_of,
    widen,
)

POLL_S = 10.0
"""How often memory is measured in greedy worlds, whatever happens."""
MEASURED = 0.5
"""How likely the figures of a worker that has become ready are told."""
TICKS_MAX = 50
"""So many wake-ups at one moment mean that the core does not act on what it woke up for."""
SETTLING_EVENTS_MAX = 20_000
"""More than any world needs to come to rest once nobody asks for anything."""


class World:
    """One simulated history. `run` raises Violation, or an AssertionError of the core's own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.setting = widen(setting_of(self.rng), seed)
        self.machines = Machines(seed, self.setting)
        devices = {device.name: device for device in self.machines.first}
        self.state = State(
            devices=self.machines.first,
            max_loaded=self.setting.max_loaded,
            keep_alive_s=self.setting.keep_alive_s,
            age_min_s=self.setting.age_min_s,
        )
        needs = {name: self.setting.need_of(name) for name in self.setting.sizes}
        ranks = {name: self.setting.ranks_of(name) for name in self.setting.sizes}
        self.books = Books(needs, ranks, devices, self.setting.max_loaded, self.setting.age_min_s)
        self.seen: Counter[str] = Counter()
        self.checks = Checks(self.books, self.seen)
        self.memory = Memory(self.rng, self.setting, self.books, self.seen)
        self.now_s = 0.0
        self.sent = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._tickets = 0
        self._names = list(self.setting.sizes)
        self._ticks_here = 0

    # --- time ------------------------------------------------------------------------------------

    def later(self, delay_s: float, thing: Callable[[], None]) -> None:
        """Have something happen after a while."""
        self._order += 1
        heapq.heappush(self._agenda, (self.now_s + delay_s, self._order, thing))

    def run(self) -> Counter[str]:
        """Live through EVENTS events, come to rest, shut down; return which hard states came up."""
        begin_with_former_workers(self)
        self.machines.begin(self)
        self.later(0.0, self._someone)
        if self.setting.greedy:
            self.later(POLL_S, self._poll)
        while self.sent < EVENTS and self._step():
            pass
        self.memory.rest()
        self._measure()
        self._rest()
        self.checks.at_rest(self.state)
        if not self.state.stopping:
            self.send(ev.ShutDown(0.0))
        self._rest()
        self.checks.all_gone(self.state)
        return self.seen

    def _rest(self) -> None:
        last = self.sent + SETTLING_EVENTS_MAX
        while self._step():
            self.checks.hold(self.sent < last, "the world does not come to rest")

    def _step(self) -> bool:
        wake_s = next_wake_s(self.state)
        at_s = self._agenda[0][0] if self._agenda else math.inf
        if wake_s < at_s:
            self._ticks_here = self._ticks_here + 1 if wake_s <= self.now_s else 0
            self.checks.hold(self._ticks_here < TICKS_MAX, "wakes up for nothing, again and again")
            self.now_s = max(self.now_s, wake_s)
            self.send(ev.Tick())
            return True
        if not self._agenda:
            return False
        at_s, _, thing = heapq.heappop(self._agenda)
        self._ticks_here = self._ticks_here if at_s <= self.now_s else 0
        self.now_s = max(self.now_s, at_s)
        thing()
        return True

    # --- the edge --------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> None:
        """Let the core decide, check the decision and do what it wants."""
        self.sent += 1
        before = self.state
        self.state, wanted = decide(before, event, self.now_s)
        self.checks.begin(self.now_s)
        for action in wanted:
            self._perform(action)
        self.checks.check_decision(self.state, event, wanted)

    def _perform(self, action: a.Action) -> None:
        to = getattr(action, "worker", None)
        self.checks.hold(to not in self.books.lost_workers, "nothing is sent to a lost machine")
        match action:
            case a.StartLoad():
                self.checks.start(action)
                self._launch(self.books.processes[action.worker])
            case a.StopWorker(number):
                self.checks.stop(action)
                self._end_by_order(self.books.processes[number])
            case a.Shrink():
                self._shrink(self.checks.shrink(action), action.target_bytes)
            case a.AbortStreams(tickets):
                for request in self.checks.abort(tickets):
                    self.later(self.rng.uniform(0, 0.2), partial(self.release, request))
            case a.Grant(ticket, worker):
                self._stream(self.checks.grant(ticket, worker))
            case a.Done(ticket) | a.Refuse(ticket):
                request = self.checks.answer(action)
                self.later(self.rng.choice((0.0, 0.1)), lambda: self.release(request))

    def _poll(self) -> None:
        """Measure now and then, as the edge does; elsewhere that would tell nothing."""
        if self.sent < EVENTS:
            self.later(POLL_S, self._poll)
            self._measure()

    def _measure(self) -> None:
        self.send(self.memory.read())

    # --- people ----------------------------------------------------------------------------------

    def _someone(self) -> None:
        if self.sent >= EVENTS:
            return
        self.later(self.rng.expovariate(1 / self.setting.arrival_s), self._someone)
        if self.sent >= self.setting.shutdown_at and not self.state.stopping:
            self.seen["shutdown in the middle"] += 1
            self.send(ev.ShutDown(self.rng.choice((0.0, 5.0))))
            return
        name = self.rng.choices(self._names, self.setting.weights)[0]
        draw = self.rng.random()
        if draw < 0.85:
            self._arrive(name)
        elif draw < 0.94:
            self._load(name)
        else:
            self._unload(name)

    def _request(self, name: str, *, lease: bool, unload: bool = False) -> Request:
        self._tickets += 1
        request = Request(f"t{self._tickets}", name, self.now_s, lease, unload)
        self.books.requests[request.ticket] = request
        if not unload:
            self.books.waiting[request.ticket] = request
        if self.rng.random() < 0.2:
            patience_s = self.rng.choice((0.01, 1.0, 10.0))
            self.later(patience_s, lambda: self._leave(request))
        return request

    def _arrive(self, name: str) -> None:
        model = self.state.models.get(name)
        if model is None or isinstance(model.phase, phases.Cold):
            self._measure()
        self._note_arrival(name)
        keep_alive_s = self.rng.choice((None, None, None, 0.0, 10.0, math.inf))
        request = self._request(name, lease=True)
        facts = self.setting.facts_of(name)
        self.send(ev.Arrived(request.ticket, name, name, f"/{name}", facts, keep_alive_s))

    def _note_arrival(self, name: str) -> None:
        model = self.state.models.get(name)
        if model is not None:
            self.seen[f"arrival while {type(model.phase).__name__.lower()}"] += 1
        if not self.state.stopping and name not in self.books.draining:
            self.books.worth.uses.setdefault(name, []).append(self.now_s)

    def _load(self, name: str) -> None:
        self._measure()
        pinned = self.rng.choice((None, None, True, False))
        spec = LoadSpec(pinned=pinned, keep_alive_s=self.rng.choice((None, 3.0, math.inf)))
        request = self._request(name, lease=False)
        facts = self.setting.facts_of(name)
        if pinned is not None:
            self.books.pins_to_come[name] = pinned
        process, was = self.books.process_of(name), frozenset(self.books.pinned)
        if process is not None and process.stage is not Stage.STOPPING:
            self.books.pin(name)
        self.send(ev.LoadAsked(request.ticket, name, name, f"/{name}", facts, spec))
        if request.refused:
            self.books.pins_to_come.pop(name, None)
            self.books.pinned = set(was)

    def _unload(self, name: str) -> None:
        request = self._request(name, lease=False, unload=True)
        self.books.pinned.discard(name)
        self.books.pins_to_come.pop(name, None)
        process = self.books.process_of(name)
        if process is not None and process.stage is Stage.READY and self.books.leases.get(name):
            self.books.draining.add(name)
        self.books.wanted.pop(name, None)
        grace_s = self.rng.choice((0.0, 2.0, 30.0))
        self.send(ev.UnloadAsked(request.ticket, name, grace_s, self.rng.random() < 0.3))

    def _leave(self, request: Request) -> None:
        if request.released:
            return
        if not request.answered:
            self.seen["cancel while queued"] += 1
        self.release(request)

    def release(self, request: Request) -> None:
        """Have a request be over, if it is not yet."""
        if request.released:
            return
        self.checks.release(request)
        self.send(ev.Released(request.ticket, request.digest))

    def _stream(self, request: Request) -> None:
        if request.lease:
            self.memory.grow(self.books.processes[request.worker])
            self.later(
                self.rng.expovariate(1 / self.setting.stream_s), lambda: self.release(request)
            )

    # --- workers ---------------------------------------------------------------------------------

    def _shrink(self, process: Process, target_bytes: int) -> None:
        """Have a worker give memory back, and answer; or not, or late, or with a lie."""
        fault = self.memory.fault()
        answer_s = self.rng.uniform(5, 60) if fault == "late" else self.rng.uniform(0.01, 2)

        def send_answer() -> None:
            answer = self.memory.shrink(process, target_bytes, fault)
            if fault != "lost":
                self._measure()
                process.shrinking = False
                self.send(answer)

        self.later(answer_s, send_answer)

    def _draw_fault(self) -> bool:
        return self.rng.random() < self.setting.fault

    def _launch(self, process: Process) -> None:
        need_s = 0.5 + process.need_bytes / (1 << 24)
        load_s = min(LOAD_S_MAX, need_s * self.rng.uniform(0.5, 2))
        number, name = process.number, process.digest
        for part in (0.3, 0.6):
            if not self._draw_fault():
                step = LoadProgress("reading weights", int(part * 100), 100)
                self._report(process, part * load_s, ev.Progressed(number, step))
        if not self._draw_fault():
            self._report(process, load_s, ev.Ready(number))
            return
        fault = self.rng.choice(("crash", "memory", "hang", "lost reply", "slow"))
        self.seen[f"{fault} while loading"] += 1
        match fault:
            case "crash" | "memory":
                at_s = self.rng.uniform(0, load_s)
                self.later(at_s, lambda: self._end(process))
                code = -9 if fault == "memory" else 3
                self._report(process, at_s, ev.LoadFailed(number, WorkerExited(name, (), code)))
            case "hang" | "lost reply":
                self.later(STALL_S, lambda: self._end(process))
                error = WorkerTimedOut(name, (), STALL_S)
                self._report(process, STALL_S, ev.LoadFailed(number, error))
            case _:
                self._report(process, LOAD_S_MAX, ev.Ready(number))

    def _end(self, process: Process) -> None:
        process.alive = False

    def _report(self, process: Process, delay_s: float, event: ev.Event) -> None:
        self.later(delay_s, lambda: self._tell(process, event))

    def _tell(self, process: Process, event: ev.Event) -> None:
        """Deliver what a worker reports; of one that is being stopped only sometimes, and late."""
        self._measure()
        if process.number not in self.books.processes:
            return
        if process.stage is Stage.STOPPING:
            if self.rng.random() < 0.5:
                self.seen["late event"] += 1
                self.send(event)
            return
        if not isinstance(event, ev.Progressed) and self._draw_fault():
            self.seen["duplicate event"] += 1
            self.later(self.rng.choice((0.0, 1.0, 30.0)), lambda: self.send(event))
        match event:
            case ev.Ready():
                self.checks.ready(process)
                self.memory.grow(process)
                if self._draw_fault():
                    self.later(self.rng.uniform(0, 60), lambda: self._die(process))
                if self.rng.random() < MEASURED:
                    self.later(self.rng.uniform(0, 5), lambda: self._say_what_it_takes(process))
            case ev.LoadFailed():
                self.checks.note_end(process)
            case _:
                pass
        self.send(event)

    def _say_what_it_takes(self, process: Process) -> None:
        """A ready worker is measured to take more or less than was reckoned."""
        books = self.books
        known = process.number in books.processes and process.digest not in books.draining
        if process.stage is not Stage.READY or not known or self.state.stopping:
            return
        figures = self.memory.figures(process)
        self.seen["measured"] += 1
        self.send(ev.Measured(process.number, figures))

    def _die(self, process: Process) -> None:
        """A ready worker dies; its end is reported a moment later, its streams break."""
        if process.number not in self.books.processes:
            return
        self._end(process)
        error = WorkerLost(process.digest, cause="signal 9")
        self.later(self.rng.uniform(0, 1), lambda: self._report_death(process, error))

    def _report_death(self, process: Process, error: WorkerLost) -> None:
        event = ev.WorkerDied(process.number, error)
        self._measure()
        if process.number not in self.books.processes:
            return
        if process.stage is Stage.STOPPING:
            self.seen["death while stopping"] += 1
            self.send(event)
            return
        leased = self.books.leases.get(process.digest, 0)
        self.seen["death in use" if leased else "death while idle"] += 1
        self.checks.note_end(process)
        for request in self.checks.streams_of(process):
            self.later(self.rng.uniform(0, 0.5), partial(self.release, request))
        self.send(event)
        if self._draw_fault():
            self.seen["duplicate event"] += 1
            self.later(1.0, lambda: self.send(event))

    def _end_by_order(self, process: Process) -> None:
        stop_s = self.rng.uniform(0.05, 3)
        if self._draw_fault():
            self.seen["hang while stopping"] += 1
            stop_s = STOP_S_MAX
        self.later(stop_s, lambda: self._note_unloaded(process))

    def _note_unloaded(self, process: Process) -> None:
        self._end(process)
        event = ev.Unloaded(process.number)
        self._measure()
        if process.number in self.books.processes:
            self.checks.note_end(process)
        self.send(event)
        if self._draw_fault():
            self.seen["duplicate event"] += 1
            self.later(self.rng.choice((0.0, 5.0)), lambda: self.send(event))
