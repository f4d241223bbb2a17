"""Random histories of the scheduler core: what must hold in every one of them.

Conversation.send checks each state and action (never overcommitted, no victim in use, pinned or
loading, one answer a ticket, equal inputs equal decisions); here the world around it is random.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import WorkerExited, WorkerLost
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.support.effort import SAME_EACH_TIME, examples
from tests.support.model_facts import device, facts, need_mib

SIZES = {"a": 10, "b": 40, "c": 90, "d": 200, "huge": 5000}
names = st.sampled_from(sorted(SIZES))
keep_alives = st.sampled_from([None, 0.0, 5.0, math.inf])


class Scheduler(RuleBasedStateMachine):
    """Requests come and go, workers start, fail, die and end, memory and time pass."""

    kind = "cpu"
    """Of the device; a GPU takes one load at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.budget_mib = need_mib(90, kind=self.kind) + need_mib(40, kind=self.kind) + 20
        self.talk = Conversation(device(self.budget_mib, kind=self.kind), max_loaded=3)
        self.open: dict[str, str] = {}
        """Tickets not released yet, and their models."""
        self.loading: set[int] = set()
        self.stopping: set[int] = set()
        self.living: set[int] = set()

    def note(self, wanted: tuple[a.Action, ...]) -> None:
        """Do what was asked for, as the edge would."""
        for action in wanted:
            match action:
                case a.StartLoad(worker):
                    assert action.name != "huge", "a load that can never fit was started"
                    self.loading.add(worker)
                case a.StopWorker(worker):
                    assert worker not in self.stopping, "stopped twice"
                    self.loading.discard(worker)
                    self.living.discard(worker)
                    self.stopping.add(worker)
                case a.AbortStreams(tickets):
                    for ticket in tickets:
                        assert isinstance(self.talk.answers[ticket], a.Grant)
                case a.Refuse(ticket) | a.Done(ticket):
                    assert ticket in self.open

    # --- requests --------------------------------------------------------------------------------

    def begin(self, name: str) -> str:
        """Return the ticket of a new request."""
        ticket = self.talk.ticket()
        self.open[ticket] = name
        return ticket

    @rule(name=names, keep_alive_s=keep_alives)
    def arrive(self, name: str, keep_alive_s: float | None) -> None:
        """A request for a model."""
        ticket = self.begin(name)
        idle_before = {m.digest for m in self.talk.state.models.values() if m.idle}
        event = ev.Arrived(ticket, name, name, f"/{name}", facts(SIZES[name]), keep_alive_s)
        wanted = self.talk.send(event)
        if name == "huge":
            assert [type(action) for action in wanted] == [a.Refuse]
            assert {m.digest for m in self.talk.state.models.values() if m.idle} == idle_before
        self.note(wanted)

    @rule(name=names, pinned=st.sampled_from([None, True, False]), keep_alive_s=keep_alives)
    def load(self, name: str, pinned: bool | None, keep_alive_s: float | None) -> None:
        """An operator's load."""
        ticket = self.begin(name)
        spec = LoadSpec(pinned=pinned, keep_alive_s=keep_alive_s)
        self.note(
            self.talk.send(ev.LoadAsked(ticket, name, name, f"/{name}", facts(SIZES[name]), spec))
        )

    @rule(name=names, grace_s=st.sampled_from([0.0, 3.0, 60.0]), force=st.booleans())
    def unload(self, name: str, grace_s: float, force: bool) -> None:
        """An operator's unload."""
        ticket = self.begin(name)
        self.note(self.talk.send(ev.UnloadAsked(ticket, name, grace_s, force)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A request ends, or its client goes away, at any moment."""
        ticket = data.draw(st.sampled_from(sorted(self.open)))
        self.note(self.talk.release(self.open.pop(ticket), ticket))

    # --- workers ---------------------------------------------------------------------------------

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), outcome=st.sampled_from(["step", "ready", "failed"]))
    def go_on_loading(self, data: st.DataObject, outcome: str) -> None:
        """A load goes on, succeeds or fails."""
        worker = data.draw(st.sampled_from(sorted(self.loading)))
        if outcome == "step":
            self.note(self.talk.send(ev.Progressed(worker, LoadProgress("reading weights", 1, 2))))
            return
        self.loading.discard(worker)
        if outcome == "ready":
            self.living.add(worker)
            self.note(self.talk.send(ev.Ready(worker)))
        else:
            self.note(self.talk.send(ev.LoadFailed(worker, WorkerExited("m", code=3))))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A ready worker dies."""
        worker = data.draw(st.sampled_from(sorted(self.living)))
        self.living.discard(worker)
        self.note(self.talk.send(ev.WorkerDied(worker, WorkerLost("m"))))

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A worker that was told to stop is gone."""
        worker = data.draw(st.sampled_from(sorted(self.stopping)))
        self.stopping.discard(worker)
        self.note(self.talk.send(ev.Unloaded(worker)))

    @rule(data=st.data(), worker=st.integers(0, 40))
    def late_news(self, data: st.DataObject, worker: int) -> None:
        """News of a worker that is no longer expected changes nothing."""
        if worker in self.loading | self.living | self.stopping:
            return
        before = self.talk.state
        late: list[ev.Event] = [
            ev.Ready(worker),
            ev.Unloaded(worker),
            ev.LoadFailed(worker, WorkerExited("m")),
            ev.WorkerDied(worker, WorkerLost("m")),
            ev.Progressed(worker, LoadProgress()),
        ]
        event = data.draw(st.sampled_from(late))
        assert self.talk.send(event) == ()
        assert self.talk.state == before

    # --- the world -------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 4.0, 100.0, 400.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.note(self.talk.wait(seconds))

    @rule(usable_percent=st.integers(0, 100))
    def measure(self, usable_percent: int) -> None:
        """Others take or give back memory."""
        usable_bytes = self.budget_mib * MIB * usable_percent // 100
        measured = replace(self.talk.state.devices[0], usable_bytes=usable_bytes)
        self.note(self.talk.send(ev.MemoryRead((measured,))))

    def teardown(self) -> None:
        """Let everything that is under way complete: then nobody waits for anything."""
        for _ in range(1000):
            if self.loading:
                worker = min(self.loading)
                self.loading.discard(worker)
                self.living.add(worker)
                self.note(self.talk.send(ev.Ready(worker)))
            elif self.stopping:
                worker = min(self.stopping)
                self.stopping.discard(worker)
                self.note(self.talk.send(ev.Unloaded(worker)))
            elif any(
                isinstance(m.phase, phases.Draining | phases.Queued)
                for m in self.talk.state.models.values()
            ):
                self.note(self.talk.wait(60.0))
            else:
                break
        unanswered = set(self.open) - set(self.talk.answers)
        assert not unanswered, f"nobody answered {unanswered}"
        assert not any(model.waiters for model in self.talk.state.models.values())
        for ticket, name in self.open.items():
            self.talk.release(name, ticket)
        assert not any(model.leases for model in self.talk.state.models.values())


class GpuScheduler(Scheduler):
    """The same on a GPU."""

    kind = "cuda"


for machine in (Scheduler, GpuScheduler):
    machine.TestCase.settings = settings(
        max_examples=examples(120, in_ci=60), stateful_step_count=60, deadline=None, database=None,
        derandomize=SAME_EACH_TIME,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip


TestScheduler = Scheduler.TestCase
TestGpuScheduler = GpuScheduler.TestCase
