"""The one decision function: (state, event, now) -> (state, actions). Pure and total.

Invariants:
- Every ticket that arrives is answered exactly once, unless it is released first.
- One load a model, however many wait for it; whoever leaves takes nobody else's load away.
- A draining model takes no lease and is never made ready again: it is unloaded first.
- A model that can never fit is refused before anybody is evicted.
- Equal states, events and times give equal decisions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from mlxd_controller.core import fit
from mlxd_controller.core.actions import Action, Done, Grant, Refuse
from mlxd_controller.core.adopting import adopt
from mlxd_controller.core.events import (
    Adopted,
    Arrived,
    Event,
    LoadAsked,
    LoadFailed,
    Measured,
    MemoryRead,
    Progressed,
    Ready,
    Released,
    Shrunk,
    ShutDown,
    Tick,
    UnloadAsked,
    Unloaded,
    WorkerDied,
)
from mlxd_controller.core.holding import end_holds
from mlxd_controller.core.homes import plans_for
from mlxd_controller.core.measured import learnt
from mlxd_controller.core.options import conflict, merged
from mlxd_controller.core.placing import place_all
from mlxd_controller.core.pressure import note_memory, note_shrunk, relieve
from mlxd_controller.core.queueing import enqueue
from mlxd_controller.core.state import COLD, JOINABLE, Model, Phase, State, StopReason, Waiter, Want
from mlxd_controller.core.turn import Turn
from mlxd_shared import config
from mlxd_shared.errors import (
    MlxdError,
    ModelDraining,
    ModelTooLarge,
    ModelUnloaded,
    ShuttingDown,
)
from mlxd_shared.requests import LoadSpec

Report: TypeAlias = Progressed | Ready | LoadFailed | WorkerDied | Unloaded | Shrunk | Measured
"""What workers say, or their ends."""


def decide(state: State, event: Event, now_s: float) -> tuple[State, tuple[Action, ...]]:
    """Return what the state becomes and what is to be done, in this order.

    `now_s` never goes back. An event about a worker that is no longer the model's is ignored.
    """
    turn = Turn(state, now_s)
    _apply(turn, event)
    _settle(turn, event)
    return turn.state, tuple(turn.actions)


def _apply(turn: Turn, event: Event) -> None:
    match event:
        case Arrived():
            _arrived(turn, event)
        case LoadAsked():
            _load_asked(turn, event)
        case Released():
            _released(turn, event)
        case UnloadAsked():
            _unload_asked(turn, event)
        case Adopted():
            adopt(turn, event)
        case MemoryRead(devices, arrays):
            turn.state = replace(turn.state, devices=devices, arrays=arrays)
            note_memory(turn)
        case ShutDown(grace_s):
            _shut_down(turn, grace_s)
        case Tick():
            pass  # time is read in _settle
        case _:
            _reported(turn, event)


def _settle(turn: Turn, event: Event) -> None:
    """What time and free memory bring about, whatever the event was."""
    # Not in the decision that made it ready: whoever asked for the load must see that it was.
    may_expire = isinstance(event, Tick | Released)
    for model in turn.models():
        if model.phase is Phase.DRAINING and turn.now_s >= model.drain_until_s:
            turn.abort(model)
        elif may_expire and model.idle and turn.now_s >= model.expires_s:
            turn.stop_worker(model, StopReason.EXPIRED)
    relieve(turn)
    place_all(turn)
    end_holds(turn)
    if turn.state.refused and not turn.state.crowded:
        turn.state = replace(turn.state, refused=0)


# --- requests ------------------------------------------------------------------------------------


def _known(turn: Turn, event: Arrived | LoadAsked) -> Model:
    """Return the model asked for; while it is cold, with the path and facts as they are now."""
    model = turn.state.models.get(event.digest)
    if model is None:
        turn.forget_one_of(config.MODELS_KNOWN_MAX)
        return Model(event.digest, event.name, event.path, event.facts, turn.state.keep_alive_s)
    if model.phase in COLD:
        return replace(model, name=event.name, path=event.path, facts=event.facts)
    return model


def _arrived(turn: Turn, event: Arrived) -> None:
    if turn.state.stopping:
        turn.do(Refuse(event.ticket, ShuttingDown()))
        return
    model = _known(turn, event)
    if model.phase is Phase.DRAINING:
        turn.do(Refuse(event.ticket, ModelDraining(model.name)))
        return
    model = replace(model, usage=model.usage.used(turn.now_s))
    if event.keep_alive_s is not None:
        model = replace(model, keep_alive_s=event.keep_alive_s, before=model.before or model.fixed)
    if model.phase is Phase.READY and not model.held:
        leases = model.leases | {event.ticket}
        turn.put(replace(model, leases=leases, last_used_s=turn.now_s, before=None))
        turn.do(Grant(event.ticket, model.worker, 0.0))
        return
    _wait(turn, model, Waiter(event.ticket, Want.LEASE, turn.now_s))


def _wait(turn: Turn, model: Model, waiter: Waiter) -> None:
    if turn.state.waiters >= config.LOAD_WAITERS_MAX:
        turn.refuse_full(waiter.ticket, "requests that wait for a model", config.LOAD_WAITERS_MAX)
        return
    model = turn.put(replace(model, waiters=(*model.waiters, waiter)))
    if model.phase in COLD:
        enqueue(turn, model)


def _load_asked(turn: Turn, event: LoadAsked) -> None:
    if turn.state.stopping:
        turn.do(Refuse(event.ticket, ShuttingDown()))
        return
    model = _known(turn, event)
    if model.phase is Phase.DRAINING:
        turn.do(Refuse(event.ticket, ModelDraining(model.name)))
        return
    error = _unobtainable(turn, model, event.spec)
    if error is not None:
        turn.do(Refuse(event.ticket, error))
        return
    model = replace(
        model,
        before=model.before or model.fixed,
        spec=merged(event.spec, model.spec),
        pinned=model.pinned if event.spec.pinned is None else event.spec.pinned,
        keep_alive_s=(
            model.keep_alive_s if event.spec.keep_alive_s is None else event.spec.keep_alive_s
        ),
    )
    if model.phase is Phase.READY:
        turn.put(replace(model, last_used_s=turn.now_s, before=None))
        turn.do(Done(event.ticket))
        return
    _wait(turn, replace(model, wanted=True), Waiter(event.ticket, Want.LOAD, turn.now_s))


def _unobtainable(turn: Turn, model: Model, given: LoadSpec) -> MlxdError | None:
    """Return why `given` cannot be had, before anything of it is remembered."""
    if model.phase in JOINABLE:
        return conflict(model, given)
    plans = plans_for(model, merged(given, model.spec), turn.state.devices)
    return plans if isinstance(plans, ModelTooLarge) else None


def _released(turn: Turn, event: Released) -> None:
    model = turn.state.models.get(event.digest)
    if model is None:
        return
    if event.ticket in model.leases:
        _end_lease(turn, model, event.ticket)
        return
    waiters = tuple(w for w in model.waiters if w.ticket != event.ticket)
    unloaders = tuple(t for t in model.unloaders if t != event.ticket)
    model = turn.put(replace(model, waiters=waiters, unloaders=unloaders))
    if model.phase is Phase.QUEUED and not waiters and not model.wanted:
        turn.gone(model, Phase.UNLOADED, None)


def _end_lease(turn: Turn, model: Model, ticket: str) -> None:
    model = turn.put(replace(model, leases=model.leases - {ticket}, last_used_s=turn.now_s))
    if model.phase is Phase.DRAINING and not model.leases:
        turn.stop_worker(model, model.drain_reason)


def _unload_asked(turn: Turn, event: UnloadAsked) -> None:
    model = turn.state.models.get(event.digest)
    if model is None:
        turn.do(Done(event.ticket))
        return
    if len(model.unloaders) >= config.UNLOAD_WAITERS_MAX:
        turn.refuse_full(
            event.ticket, "requests that wait for an unload", config.UNLOAD_WAITERS_MAX
        )
        return
    model = turn.refuse_waiters(model, ModelUnloaded(model.name))
    model = turn.forget_options(model)
    model = turn.put(replace(model, unloaders=(*model.unloaders, event.ticket)))
    until_s = turn.now_s if event.force else turn.now_s + event.grace_s
    match model.phase:
        case Phase.UNLOADED | Phase.FAILED | Phase.QUEUED:
            turn.gone(model, Phase.UNLOADED, None)
        case Phase.LOADING:
            turn.stop_worker(model, StopReason.ASKED)
        case Phase.READY:
            turn.drain(model, until_s=until_s, reason=StopReason.ASKED)
        case Phase.DRAINING:
            turn.put(replace(model, drain_until_s=min(until_s, model.drain_until_s)))
        case Phase.UNLOADING:
            pass  # it is on its way out; its end answers the ticket


def _shut_down(turn: Turn, grace_s: float) -> None:
    turn.state = replace(turn.state, stopping=True)
    for before in turn.models():
        model = turn.refuse_waiters(before, ShuttingDown())
        match model.phase:
            case Phase.QUEUED:
                turn.gone(model, Phase.UNLOADED, None)
            case Phase.LOADING:
                turn.stop_worker(model, StopReason.SHUTDOWN)
            case Phase.READY | Phase.DRAINING:
                until_s = min(turn.now_s + grace_s, model.drain_until_s)
                turn.drain(model, until_s=until_s, reason=StopReason.SHUTDOWN)
            case Phase.UNLOADED | Phase.FAILED | Phase.UNLOADING:
                pass


# --- what workers report -------------------------------------------------------------------------


def _reported(turn: Turn, event: Report) -> None:
    model = turn.state.by_worker(event.worker)
    if model is None:
        return
    match event, model.phase:
        case Progressed(_, progress), Phase.LOADING:
            turn.put(replace(model, progress=progress))
        case ((Shrunk() | Measured()), _):
            _told_of_memory(turn, model, event)
        case Ready(), Phase.LOADING:
            took_s = turn.now_s - model.load_began_s
            model = replace(model, phase=Phase.READY, ready_s=turn.now_s, load_s=took_s)
            turn.serve_waiters(model)
        case LoadFailed(_, error), Phase.LOADING:
            turn.failed(turn.refuse_waiters(model, error), error)
        case WorkerDied(_, error), Phase.READY:
            model = turn.failed(model, error)
            if model.waiters:  # it was held; they wait for its next worker
                enqueue(turn, model)
        case WorkerDied(), Phase.DRAINING:
            turn.gone(model, Phase.UNLOADED, None)
        case Unloaded(), Phase.UNLOADING:
            _unloaded(turn, model)
        case _:
            pass  # late news of a worker that is being stopped; Unloaded will come


def _told_of_memory(turn: Turn, model: Model, event: Shrunk | Measured) -> None:
    """Reckon with what a model takes from now on, and remember it for its next load."""
    if isinstance(event, Shrunk):
        note_shrunk(turn, model)
        return
    if model.phase is not Phase.READY:
        return
    assert model.plan is not None
    known = learnt(model.measured, model.plan.choice.way, event.figures)
    turn.put(replace(model, measured=known, plan=fit.corrected(model.plan, known)))


def _unloaded(turn: Turn, model: Model) -> None:
    ended = turn.gone(model, Phase.UNLOADED, None)
    if ended.waiters or ended.wanted:
        enqueue(turn, replace(ended, before=model.before))
