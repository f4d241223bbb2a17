"""What must hold in every history. A Violation names what does not; the seed replays it.

The judge reads actions and keeps books of its own. Of the core's state it reads only what no action
tells: that the core's list of workers is the list of processes, and that queues are empty at rest.
"""

from __future__ import annotations

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.state import State
from mlxd_shared import config
from mlxd_shared.domain.errors import ModelTooLarge, NoRoom
from tests.simulation.books import Process, Request, Stage, places_of
from tests.simulation.judge import Judge


class Checks(Judge):
    """Judges one history, decision by decision."""

    # --- the edge's own events -------------------------------------------------------------------

    def ready(self, process: Process) -> None:
        """Note that a load is complete."""
        process.stage = Stage.READY
        process.ready_at_s = self.now_s
        self.books.worth.load_s[process.digest] = self.now_s - process.began_at_s
        self.books.wanted.pop(process.digest, None)

    def adopt(self, process: Process) -> None:
        """Note that the core is about to hear of a ready worker of a former controller."""
        process.stage = Stage.READY
        process.ready_at_s = self.now_s
        self.books.processes[process.number] = process

    def check_adoption(self, process: Process) -> None:
        """Judge whether it stays: exactly where it fits beside those who do."""
        books = self.books
        staying = [
            p
            for p in books.processes.values()
            if p.stage is not Stage.STOPPING and p.digest not in books.draining
        ]
        together = {p.number: p for p in [*staying, process]}.values()
        fits = books.max_loaded is None or len(together) <= books.max_loaded
        for name in process.devices:
            here, device = [p for p in together if name in p.devices], books.devices[name]
            within = sum(p.need_bytes for p in here) <= device.budget_bytes
            fits = fits and within and len(here) <= places_of(device)
        self.hold((process in staying) == fits, "who fits stays, and nobody else")
        self.seen["adopted" if fits else "surplus"] += 1

    def note_end(self, process: Process) -> None:
        """Note that the core is about to hear of a process's end."""
        process.alive = False
        del self.books.processes[process.number]
        self.books.leases.pop(process.digest, None)
        self.books.draining.discard(process.digest)
        if process.stage is Stage.LOADING:
            self.books.wanted.pop(process.digest, None)

    def release(self, request: Request) -> None:
        """Note that a request is over."""
        request.released = True
        self.books.requests.pop(request.ticket)
        self.books.waiting.pop(request.ticket, None)
        process = self.books.processes.get(request.worker)
        if process is not None and not request.aborted:
            self.books.leases[request.digest] -= 1

    def streams_of(self, process: Process) -> list[Request]:
        """Return the requests that a process serves."""
        return [r for r in self.books.requests.values() if r.worker == process.number]

    # --- actions ---------------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """Begin to judge a decision."""
        self.now_s = now_s
        self.stopped = []
        self.no_room = []

    def start(self, action: a.StartLoad) -> None:
        """Judge a load: within memory, one a model, one at a time on a GPU."""
        books, plan = self.books, action.plan
        number, digest = action.worker, action.digest
        self.hold(number not in books.processes, "a serial number is used once")
        self.hold(books.process_of(digest) is None, "one process a model")
        self.hold(plan.need_bytes >= books.needs[digest], "a plan needs what the model needs")
        for name in plan.devices:
            self._judge_place(name, plan.need_bytes)
        ranks = books.ranks[digest]
        self.hold(len(set(plan.devices)) == ranks, "ranks have a device each, and no more")
        nodes = {books.devices[name].node for name in plan.devices}
        self.hold(len(nodes) == 1, "the ranks of a model are on one machine")
        if ranks > 1:
            self.seen["placed on several devices"] += 1
        process = Process(number, digest, plan.need_bytes, plan.devices, plan.choice, self.now_s)
        books.processes[number] = process
        for name in plan.devices:
            within = books.held_bytes(name) <= books.devices[name].budget_bytes
            self.hold(within, "never over budget")
        slots = books.max_loaded
        self.hold(slots is None or len(books.processes) <= slots, "never more than max_loaded")
        books.pin(digest)
        self.could_start.pop(digest, None)

    def _judge_place(self, name: str, need_bytes: int) -> None:
        """Judge what a load, or one of its ranks, takes of a device."""
        books = self.books
        self.hold(name in books.devices, "a model is placed on a device that there is")
        self.hold(name in books.present, "no load begins on a lost machine")
        device, there = books.devices[name], books.on(name)
        total = sum(process.need_bytes for process in there) + need_bytes
        self.hold(total <= device.usable_bytes, "never over what is usable")
        self.hold(len(there) < places_of(device), "never more than a device has places for")
        if device.kind != "cpu":
            moving = [p for p in there if p.stage is not Stage.READY]
            self.hold(not moving, "a GPU takes one load at a time, none beside an end")
        self.hold(name not in books.pressed, "no load begins above the marks")
        self._count_placing(name)

    def _count_placing(self, device: str) -> None:
        books = self.books
        if device != next(iter(books.devices)):
            self.seen["placed on a second device"] += 1
        if books.pressed:
            self.seen["placed beside a device above its marks"] += 1
        loading = [p for p in books.processes.values() if p.stage is Stage.LOADING]
        if loading and books.devices[device].kind != "cpu":
            self.seen["two GPUs load at once"] += 1

    def stop(self, action: a.StopWorker) -> None:
        """Judge a stop: of a process that runs, once, never one in use."""
        process = self.books.processes.get(action.worker)
        assert process is not None, "a worker is stopped that is gone"
        self.hold(process.stage is not Stage.STOPPING, "a worker is stopped once")
        self.hold(not self.books.leases.get(process.digest), "never a leased victim")
        if action.reason in (phases.StopReason.ROOM, phases.StopReason.PRESSURE):
            self.hold(self.books.evictable(process, self.now_s), "a victim may be evicted")
            self.seen["eviction"] += 1
            if process.devices[0] != next(iter(self.books.devices)):
                self.seen["evicted on another device"] += 1
            if len(process.devices) > 1:
                self.seen["evicted from several devices"] += 1
        if action.reason is phases.StopReason.PRESSURE:
            self._evicted_under_pressure(process)
        self.stopped.append(action)
        if process.stage is Stage.LOADING:
            self.seen["stop while loading"] += 1
            self.books.wanted.pop(process.digest, None)
        process.stage = Stage.STOPPING
        self.books.draining.discard(process.digest)

    def _evicted_under_pressure(self, process: Process) -> None:
        books, now_s = self.books, self.now_s
        self.seen["eviction under pressure"] += 1
        names = [name for name in process.devices if name in books.pressed]
        self.hold(bool(names), "nobody is evicted below the marks")
        ready = [name for name in names if not books.to_be_told(name, now_s)]
        self.hold(bool(ready), f"{process.digest} goes before all have shrunk")
        waiting = all(
            any(p.shrinking and now_s < p.told_at_s + config.SHRINK_TIMEOUT_S for p in books.on(n))
            for n in ready
        )
        self.hold(not waiting, "nobody is evicted while another shrinks")

    def shrink(self, action: a.Shrink) -> Process:
        """Judge an order to shrink: above the marks, one at a time, the idle before the busy."""
        books, now_s = self.books, self.now_s
        process = books.processes.get(action.worker)
        assert process is not None, "a worker shrinks that is gone"
        names = [name for name in process.devices if name in books.pressed]
        self.hold(bool(names), "nobody shrinks below the marks")
        names = [name for name in names if not books.giving_back(name, now_s)]
        self.hold(bool(names), "one gives memory back at a time")
        due = {name: books.to_be_told(name, now_s) for name in names}
        self.hold(process in due[names[0]], "a worker that runs shrinks, and not again too soon")
        if books.leases.get(process.digest):
            all_busy = any(all(books.leases.get(p.digest) for p in due[name]) for name in names)
            self.hold(all_busy, "the idle shrink before the busy")
            self.seen["shrink in use"] += 1
        lack_bytes = max(books.excess[name] for name in process.devices)
        target_bytes = max(0, process.told_bytes - lack_bytes)
        self.hold(action.target_bytes == target_bytes, "what each device lacks is given back")
        if len(process.devices) > 1:
            self.seen["shrink on several devices"] += 1
        self.seen["shrink"] += 1
        process.shrinking = process.is_reported = True
        process.told_at_s = now_s
        return process

    def abort(self, tickets: tuple[str, ...]) -> list[Request]:
        """Judge the end of streams: each is a lease, of a model that drains."""
        requests = [self.books.requests[ticket] for ticket in tickets]
        self.hold(bool(requests), "nothing is aborted for nothing")
        for request in requests:
            self.hold(bool(request.worker) and not request.aborted, "only leases are aborted")
            request.aborted = True
            self.books.leases[request.digest] -= 1
        self.seen["streams aborted"] += 1
        return requests

    def grant(self, ticket: str, worker: int) -> Request:
        """Judge a lease: on a ready worker of the right model that is not on its way out."""
        request = self._note_answer(ticket)
        process = self.books.processes.get(worker)
        assert process is not None, "a lease on a worker that is gone"
        self.hold(request.lease, "only requests get leases")
        self.hold(process.digest == request.digest, "a lease on the model that was asked for")
        self.hold(process.stage is Stage.READY, "a lease on a ready worker")
        self.hold(process.digest not in self.books.draining, "a draining model takes no lease")
        request.worker = worker
        self.books.leases[request.digest] = self.books.leases.get(request.digest, 0) + 1
        return request

    def answer(self, action: a.Done | a.Refuse) -> Request:
        """Judge a refusal, or the end of what an operator asked for."""
        request = self._note_answer(action.ticket)
        match action:
            case a.Done():
                process = self.books.process_of(request.digest)
                if request.unload:
                    self.hold(process is None, "an unload is done when the process is gone")
                else:
                    self.hold(not request.lease, "a request gets a lease, not Done")
                    ready = process is not None and process.stage is Stage.READY
                    self.hold(ready, "a load is done when the model is ready")
            case a.Refuse(_, error):
                request.refused = True
                if self.books.gives_up_load(request):
                    self.books.pins_to_come.pop(request.digest, None)
                self.seen[f"refused: {type(error).__name__}"] += 1
                if isinstance(error, NoRoom):
                    self.no_room.append(request.digest)
                    self._sent_away(request, error)
                if isinstance(error, ModelTooLarge):
                    fits = self.books.can_hold(request.digest)
                    self.hold(not fits, "what can fit is not refused as too large")
        return request

    def _sent_away(self, request: Request, error: NoRoom) -> None:
        """Hold that nobody is told to come back in vain, or before the time but for a loss."""
        fits = self.books.can_hold(request.digest)
        self.hold(fits, "what can never fit is not told to come back")
        reachable = self.books.can_reach(request.digest)
        self.hold(bool(error.lost) != reachable, "who is sent away is told of lost machines")
        if not reachable:
            self.seen["out of reach"] += 1
            return
        waited_s = self.now_s - request.since_s
        self.hold(waited_s >= config.ROOM_WAIT_MAX_S - 1e-6, "nobody is sent away too soon")

    def _note_answer(self, ticket: str) -> Request:
        request = self.books.requests.get(ticket)
        assert request is not None, f"{ticket} is answered after its end"
        self.hold(not request.answered, "each request ends exactly once")
        request.answered = True
        self.books.waiting.pop(ticket, None)
        return request

    # --- decisions as a whole --------------------------------------------------------------------

    def check_decision(self, state: State, event: ev.Event, wanted: tuple[a.Action, ...]) -> None:
        """Judge what a decision left undone, and whom it sent away for whom."""
        books = self.books
        if isinstance(event, ev.LoadAsked) and event.ticket in books.waiting:
            books.wanted.setdefault(event.digest, self.now_s)
        for digest in tuple(books.wanted):  # given up with nobody left to be told
            if not phases.demand_of(state.models[digest].phase).wanted:
                del books.wanted[digest]
                if books.process_of(digest) is None:
                    books.pins_to_come.pop(digest, None)
        known = sum(1 for model in state.models.values() if model.worker is not None)
        self.hold(known == len(books.processes), "no worker leaks")
        self.check_holds()
        self._check_relief(state)
        if not books.waiting and not books.wanted:
            self.could_start.clear()
            self._victims_serve([])
            return
        if not state.stopping:
            line = [d for d in books.list_queued() if books.can_hold(d)]
            self.hold(all(map(books.can_reach, line)), "nobody waits for a lost machine")
            self._victims_serve(line)
            self.backing_off = {m.digest for m, q in state.queue() if q.backing_off} & {*line}
            self._victims_are_cheapest([d for d in line if d not in self.backing_off])
            self.check_in_time([d for d in line if d not in self.backing_off])
        self.check_bounds()

    def _victims_serve(self, line: list[str]) -> None:
        victims = [action for action in self.stopped if action.reason is phases.StopReason.ROOM]
        if not victims:
            return
        now_s, books = self.now_s, self.books
        self.hold(bool(line), "nobody is evicted for nobody")
        left = books.count_left(now_s, closed_too=True)
        served = any(books.can_make_room(d, left, books.needs[d], 1) for d in line)
        self.hold(served, "nobody is evicted for what cannot fit")
        if len(victims) > 1:
            self.seen["several victims"] += 1
        if books.pinned & {p.digest for p in books.processes.values()}:
            self.seen["pins under pressure"] += 1

    def _victims_are_cheapest(self, line: list[str]) -> None:
        """Hold that one model's room is made where it costs least, on whatever device."""
        books = self.books
        victims = {a.worker for a in self.stopped if a.reason is phases.StopReason.ROOM}
        others = [p for p in books.processes.values() if p.number not in victims]
        leaving = books.draining or any(p.stage is Stage.STOPPING for p in others)
        if not victims or len(line) != 1 or leaving:
            return
        offered = [books.processes[number] for number in victims]
        offered += [p for p in others if books.evictable(p, self.now_s)]
        least = books.cheapest_eviction(line[0], offered)
        if least is None:
            return
        if len({p.devices for p in offered}) > 1:
            self.seen["a choice between evictions on two devices"] += 1
        paid = sum(books.worth_of(books.processes[number]) for number in victims)
        self.hold(paid <= least * (1 + 1e-6) + 1e-9, "the cheapest eviction of all is chosen")

    def _check_relief(self, state: State) -> None:
        """Hold that memory is given back above the marks, while anybody has any to give."""
        books, now_s = self.books, self.now_s
        for name in () if state.stopping else sorted(books.pressed):
            if books.giving_back(name, now_s):
                continue
            self.seen["pressure that only streams can end"] += 1
            self.hold(not books.to_be_told(name, now_s), "above the marks workers shrink")
            there = books.on(name)
            leaving = sum(p.need_bytes for p in there if p.digest in books.draining)
            if books.excess[name] > leaving:
                idle = [p for p in there if books.evictable(p, now_s)]
                self.hold(not idle, "above the marks idle models go")

    # --- ends ------------------------------------------------------------------------------------

    def at_rest(self, state: State) -> None:
        """Judge a world in which nothing is under way any more."""
        self.hold(not self.books.requests, "each request ends")
        for model in state.models.values():
            quiet = isinstance(model.phase, phases.Ready | phases.Cold)
            self.hold(quiet, f"{model.digest} rests in {type(model.phase).__name__}")
            demand = phases.demand_of(model.phase)
            self.hold(not (demand.stands or model.leases or model.unloaders), "every queue empties")

    def all_gone(self, state: State) -> None:
        """Judge the end of the controller: no process is left."""
        self.at_rest(state)
        self.hold(not self.books.processes, "no process outlives its controller")
        self.hold(all(m.worker is None for m in state.models.values()), "no worker leaks")
