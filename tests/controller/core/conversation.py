"""A scheduler core to talk to: sends events, keeps the state, the clock and every action.

Checks after each event what must always hold, so that every conversation is also a proof of it.
"""

from __future__ import annotations

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.placement.room import room_of
from mlxd_controller.core.schedule import decide
from mlxd_controller.core.state import Model, State
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.errors import MlxdError, WorkerLost
from mlxd_shared.domain.requests import LoadSpec
from tests.support.model_facts import facts

EndedBy = a.Grant | a.Done | a.Refuse


class Conversation:
    """One scheduler; time stands still unless `wait` is called."""

    def __init__(
        self,
        *devices: Device,
        max_loaded: int | None = None,
        keep_alive_s: float = 300.0,
        age_min_s: float = 0.0,
    ) -> None:
        self.state = State(
            devices=devices,
            max_loaded=max_loaded,
            keep_alive_s=keep_alive_s,
            age_min_s=age_min_s,
        )
        self.now_s = 1000.0
        self.answers: dict[str, EndedBy] = {}
        self.aborted: dict[str, MlxdError] = {}
        self.released: set[str] = set()
        self._tickets = 0

    # --- what happens ----------------------------------------------------------------------------

    def send(self, event: ev.Event) -> tuple[a.Action, ...]:
        """Send one event; return the actions after checking them."""
        before = self.state
        self.state, wanted = decide(before, event, self.now_s)
        again = decide(before, event, self.now_s)
        assert repr(again) == repr((self.state, wanted)), "equal inputs, different decisions"
        for action in wanted:
            self._note(action)
        check_state(self.state)
        self._check_actions(before, wanted)
        return wanted

    def arrive(
        self, name: str, mib: int = 10, *, keep_alive_s: float | None = None
    ) -> tuple[str, tuple[a.Action, ...]]:
        """A request for a model of `mib` arrives; return its ticket and the actions."""
        ticket = self.ticket()
        model = facts(mib)
        event = ev.Arrived(ticket, name, name, f"/{name}", model, keep_alive_s)
        return ticket, self.send(event)

    def load(
        self, name: str, spec: LoadSpec, mib: int = 10, *, model: ModelFacts | None = None
    ) -> tuple[str, tuple[a.Action, ...]]:
        """An operator asks for a load."""
        ticket = self.ticket()
        event = ev.LoadAsked(ticket, name, name, f"/{name}", model or facts(mib), spec)
        return ticket, self.send(event)

    def unload(
        self, name: str, *, grace_s: float = 30.0, force: bool = False
    ) -> tuple[str, tuple[a.Action, ...]]:
        """An operator asks for an unload."""
        ticket = self.ticket()
        return ticket, self.send(ev.UnloadAsked(ticket, name, grace_s, force))

    def release(self, name: str, ticket: str) -> tuple[a.Action, ...]:
        """A request is over."""
        self.released.add(ticket)
        return self.send(ev.Released(ticket, name))

    def ready(self, name: str) -> tuple[a.Action, ...]:
        """The load of a model completes."""
        return self.send(ev.Ready(self.worker(name)))

    def die(self, name: str) -> tuple[a.Action, ...]:
        """The worker of a ready model dies."""
        return self.send(ev.WorkerDied(self.worker(name), WorkerLost(name, cause="signal 9")))

    def note_gone(self, name: str) -> tuple[a.Action, ...]:
        """A worker that was told to stop has ended."""
        return self.send(ev.Unloaded(self.worker(name)))

    def wait(self, seconds: float) -> tuple[a.Action, ...]:
        """Time passes."""
        self.now_s += seconds
        return self.send(ev.Tick())

    def serve(self, name: str, mib: int = 10) -> str:
        """A request arrives, its model is loaded if need be, and it holds a lease."""
        ticket, _ = self.arrive(name, mib)
        if self.phase(name) is phases.Loading:
            self.ready(name)
        assert isinstance(self.answers[ticket], a.Grant)
        return ticket

    def make_idle(self, name: str, mib: int = 10) -> None:
        """Leave the model ready and unused."""
        self.release(name, self.serve(name, mib))

    # --- what is true ----------------------------------------------------------------------------

    def ticket(self) -> str:
        """Return a new ticket."""
        self._tickets += 1
        return f"t{self._tickets}"

    def model(self, name: str) -> Model:
        """Return a model as it is."""
        return self.state.models[name]

    def phase(self, name: str) -> type[phases.Phase]:
        """Return which phase a model is in."""
        return type(self.state.models[name].phase)

    def worker(self, name: str) -> int:
        """Return the number of a model's worker, which it must have."""
        worker = self.state.models[name].worker
        assert worker is not None, f"{name} has no worker"
        return worker

    def refusal(self, ticket: str) -> MlxdError:
        """Return why a request was refused."""
        answer = self.answers[ticket]
        assert isinstance(answer, a.Refuse)
        return answer.error

    def _note(self, action: a.Action) -> None:
        match action:
            case a.Grant(ticket) | a.Done(ticket) | a.Refuse(ticket):
                assert ticket not in self.answers, f"{ticket} was answered twice"
                assert ticket not in self.released, f"{ticket} was answered after its release"
                self.answers[ticket] = action
            case a.AbortStreams(tickets, error):
                self.aborted.update(dict.fromkeys(tickets, error))
            case _:
                pass

    def _check_actions(self, before: State, wanted: tuple[a.Action, ...]) -> None:
        lost = {device.name for device in self.state.devices if device.lost}
        for model in before.models.values():
            if model.plan is not None and not lost.isdisjoint(model.plan.devices):
                sent = [action for action in wanted if getattr(action, "worker", 0) == model.worker]
                assert not sent, "something was sent to a lost machine"
        for action in wanted:
            if isinstance(action, a.StartLoad):
                device = self.state.device_named(action.plan.device)
                assert device is not None, "a load was started on no device"
                assert not device.lost, "a load was started on a lost device"
                free_bytes = room_of(self.state, device).free_bytes
                assert free_bytes >= 0, "a load was started without room"
                assert action.worker >= before.next_worker, "a serial number was used twice"
            if isinstance(action, a.Shrink):
                model = self.state.models[action.digest]
                assert isinstance(model.phase, phases.Ready)
                pressed = [d for d in self.state.devices if d.name in self.state.pressed]
                here = any(self.state.lives_on(model, device) for device in pressed)
                assert here, "a worker shrinks below the marks"
            if isinstance(action, a.StopWorker) and action.reason.value in {"room", "pressure"}:
                victim = self.state.models[action.digest]  # it may have become idle just now
                assert not victim.leases, "a victim was in use"
                assert not victim.pinned, "a victim was pinned"


def check_state(state: State) -> None:
    """Assert what a state must always satisfy; see mlxd_controller.core.state."""
    seen: set[str] = set()
    workers: set[int] = set()
    for model in state.models.values():
        match model.phase:
            case phases.Queued(plans=plans):
                assert plans, "a place in the queue without a plan"
            case phases.Draining(leases=leases):
                assert leases, "draining nobody"
            case _:
                pass
        tickets = [*model.leases, *(w.ticket for w in model.waiters), *model.unloaders]
        assert len(tickets) == len({*tickets} - seen), "a ticket is in two places"
        seen.update(tickets)
        if model.worker is not None:
            assert model.worker not in workers, "two models share a worker"
            workers.add(model.worker)
    # Workers of a former controller may have been too many: those are on their way out.
    surplus = [model for model in state.models.values() if _surplus(model)]
    if state.max_loaded is not None:
        assert len(workers) - len(surplus) <= state.max_loaded
    for device in state.devices:
        _check_device(state, device)
    for queued in (queued for _, queued in state.queue()):
        present = {device.name for device in state.devices if not device.lost}
        homes = {name for plan in queued.plans for name in plan.devices}
        assert homes <= present, "it waits for a lost device"


def _surplus(model: Model) -> bool:
    match model.phase:
        case phases.Unloading(reason=reason):
            return reason is StopReason.SURPLUS
        case _:
            return False


def _check_device(state: State, device: Device) -> None:
    here = [model for model in state.models.values() if state.lives_on(model, device)]
    assert not (here and device.lost), "something lives on a lost device"
    loading = [model for model in here if isinstance(model.phase, phases.Loading)]
    assert device.kind == "cpu" or len(loading) <= 1, "two loads at once on one GPU"
    surplus_bytes = sum(model.reserved_on(device.name) for model in here if _surplus(model))
    assert state.reserved_on(device) - surplus_bytes <= device.budget_bytes, "overcommitted"
