"""The one decision function: (state, event, now) -> (state, actions). Pure and total.

Invariants:
- Every ticket that arrives is answered exactly once, unless it is released first.
- One load per model, however many wait for it; a request that leaves ends no load of others.
- A draining model takes no lease and is never made ready again: it is unloaded first.
- A model that can never fit is refused before anybody is evicted.
- Equal states, events and times give equal decisions.
- Where a plan needs what ranks have of a model, and nobody has described that, nothing is decided
  but that it be described.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, assert_never

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.adopting import adopt
from mlxd_controller.core.demand import Fixed, Waiter, Want
from mlxd_controller.core.ends import end_unload, replace_dead
from mlxd_controller.core.machines import note_devices
from mlxd_controller.core.options import conflict, fill_in, with_configured
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.placement.holding import end_holds
from mlxd_controller.core.placement.homes import plans_for
from mlxd_controller.core.placement.placing import place_all
from mlxd_controller.core.placement.pressure import note_shrunk, relieve
from mlxd_controller.core.placement.queueing import enqueue
from mlxd_controller.core.state import Model, State
from mlxd_controller.core.turn import Turn
from mlxd_models.fit.facts import Undescribed
from mlxd_models.fit.measured import Figures, learn
from mlxd_models.fit.planner import correct
from mlxd_shared import config
from mlxd_shared.domain import errors as e
from mlxd_shared.domain.requests import LoadSpec

Report: TypeAlias = (
    ev.Progressed | ev.Ready | ev.LoadFailed | ev.WorkerDied | ev.Unloaded | ev.Shrunk | ev.Measured
)
"""What workers say, or their ends."""


def decide(state: State, event: ev.Event, now_s: float) -> tuple[State, tuple[a.Action, ...]]:
    """Return what the state becomes and what is to be done, in this order.

    `now_s` never goes back. An event about a worker that is no longer the model's is ignored.
    """
    turn = Turn(state, now_s)
    try:
        _apply(turn, event)
        _settle(turn, event)
    except Undescribed as lacking:
        return state, (a.DescribeRanks(lacking.division),)
    return turn.state, tuple(turn.actions)


def _apply(turn: Turn, event: ev.Event) -> None:
    match event:
        case ev.Arrived():
            _arrive(turn, event)
        case ev.LoadAsked():
            _load_asked(turn, event)
        case ev.Released():
            _release(turn, event)
        case ev.UnloadAsked():
            _unload_asked(turn, event)
        case ev.Adopted():
            adopt(turn, event)
        case ev.MemoryRead():
            note_devices(turn, event)
        case ev.ShutDown(grace_s):
            _shut_down(turn, grace_s)
        case ev.Tick():
            pass  # time is read in _settle
        case _:
            _handle_report(turn, event)


def _settle(turn: Turn, event: ev.Event) -> None:
    """Do what time and free memory demand, whatever the event was."""
    # Not in the decision that made it ready: the request for the load must see that it was.
    may_expire = isinstance(event, ev.Tick | ev.Released)
    for model in turn.models():
        phase = model.phase
        if isinstance(phase, phases.Draining) and turn.now_s >= phase.until_s:
            turn.abort(model, phase)
        elif may_expire and model.idle and turn.now_s >= model.expires_s:
            turn.stop_worker(model, StopReason.EXPIRED)
    relieve(turn)
    place_all(turn)
    end_holds(turn)
    if turn.state.refused and not turn.state.crowded:
        turn.state = replace(turn.state, refused=0)


# --- requests ------------------------------------------------------------------------------------


def _find_model(turn: Turn, event: ev.Arrived | ev.LoadAsked) -> Model | None:
    """Return the requested model; while it is cold, with its current path and facts.

    None: it takes no request now, and this one was refused.
    """
    if turn.state.stopping:
        turn.do(a.Refuse(event.ticket, e.ShuttingDown()))
        return None
    model = turn.state.models.get(event.digest)
    if model is None:
        turn.forget_one_of(config.MODELS_KNOWN_MAX)
        keep_alive_s = turn.state.keep_alive_s
        new = Model(event.digest, event.name, event.path, event.facts, keep_alive_s)
        return with_configured(new, event.configured, keep_alive_s=keep_alive_s)
    if isinstance(model.phase, phases.Cold):
        return replace(model, name=event.name, path=event.path, facts=event.facts)
    if isinstance(model.phase, phases.Draining):
        turn.do(a.Refuse(event.ticket, e.ModelDraining(model.name)))
        return None
    return model


def _arrive(turn: Turn, event: ev.Arrived) -> None:
    model = _find_model(turn, event)
    if model is None:
        return
    model = replace(model, usage=model.usage.add_use(turn.now_s))
    before: Fixed | None = None
    if event.keep_alive_s is not None:
        before = model.fixed
        model = replace(model, keep_alive_s=event.keep_alive_s)
    if isinstance(model.phase, phases.Ready) and not model.held:
        leased = replace(model.phase, leases=model.phase.leases | {event.ticket})
        turn.put(replace(model, phase=leased, last_used_s=turn.now_s))
        turn.do(a.Grant(event.ticket, leased.worker, 0.0))
        return
    _wait(turn, model, Waiter(event.ticket, Want.LEASE, turn.now_s), before)


def _wait(turn: Turn, model: Model, waiter: Waiter, before: Fixed | None) -> None:
    """Add a waiter for `model`, whose options replaced what was fixed `before`."""
    if turn.state.waiters >= config.LOAD_WAITERS_MAX:
        turn.refuse_full(waiter.ticket, "requests that wait for a model", config.LOAD_WAITERS_MAX)
        return
    demand = phases.demand_of(model.phase).add(waiter, before)
    if isinstance(model.phase, phases.Cold):
        enqueue(turn, model, demand)
    else:
        turn.put(replace(model, phase=phases.with_demand(model.phase, demand)))


def _load_asked(turn: Turn, event: ev.LoadAsked) -> None:
    model = _find_model(turn, event)
    if model is None:
        return
    error = _unobtainable(turn, model, event.spec)
    if error is not None:
        turn.do(a.Refuse(event.ticket, error))
        return
    before = model.fixed
    model = replace(
        model,
        spec=fill_in(event.spec, model.spec),
        pinned=model.pinned if event.spec.pinned is None else event.spec.pinned,
        keep_alive_s=(
            model.keep_alive_s if event.spec.keep_alive_s is None else event.spec.keep_alive_s
        ),
    )
    if isinstance(model.phase, phases.Ready):
        # Waiters of a held model keep these options too, if it is loaded again for them.
        kept = replace(phases.demand_of(model.phase), before=None)
        phase = phases.with_demand(model.phase, kept)
        turn.put(replace(model, phase=phase, last_used_s=turn.now_s))
        turn.do(a.Done(event.ticket))
        return
    _wait(turn, model, Waiter(event.ticket, Want.LOAD, turn.now_s), before)


def _unobtainable(turn: Turn, model: Model, spec: LoadSpec) -> e.MlxdError | None:
    """Return why `spec` is impossible, before any of it is stored."""
    if isinstance(model.phase, phases.Joinable):
        return conflict(model, spec)
    plans = plans_for(model, fill_in(spec, model.spec), turn.state.devices)
    return plans if isinstance(plans, e.MlxdError) else None


def _release(turn: Turn, event: ev.Released) -> None:
    model = turn.state.models.get(event.digest)
    if model is None:
        return
    if event.ticket in model.leases:
        _end_lease(turn, model, event.ticket)
        return
    phase = phases.without_ticket(model.phase, event.ticket)
    model = turn.put(replace(model, phase=phase))
    if isinstance(phase, phases.Queued) and not phase.demand.stands:
        turn.end(model, phases.UNLOADED)


def _end_lease(turn: Turn, model: Model, ticket: str) -> None:
    phase = model.phase
    assert isinstance(phase, phases.Ready | phases.Draining)
    leases = phase.leases - {ticket}
    phase = replace(phase, leases=leases)
    model = turn.put(replace(model, phase=phase, last_used_s=turn.now_s))
    if isinstance(phase, phases.Draining) and not leases:
        turn.stop_worker(model, phase.reason)


def _unload_asked(turn: Turn, event: ev.UnloadAsked) -> None:
    model = turn.state.models.get(event.digest)
    if model is None:
        turn.do(a.Done(event.ticket))
        return
    if len(model.unloaders) >= config.UNLOAD_WAITERS_MAX:
        turn.refuse_full(
            event.ticket, "requests that wait for an unload", config.UNLOAD_WAITERS_MAX
        )
        return
    model = turn.refuse_waiters(model, e.ModelUnloaded(model.name))
    model = turn.forget_options(model)
    unloader = (event.ticket,)
    until_s = turn.now_s if event.force else turn.now_s + event.grace_s
    match model.phase:
        case phases.Unloaded() | phases.Failed() | phases.Queued():
            turn.do(a.Done(event.ticket))
            turn.end(model, phases.UNLOADED)
        case phases.Loading():
            turn.stop_worker(model, StopReason.ASKED, unloaders=unloader)
        case phases.Ready() as ready:
            turn.drain(model, ready, until_s=until_s, reason=StopReason.ASKED, unloaders=unloader)
        case phases.Draining() as draining:
            sooner_s = min(until_s, draining.until_s)
            unloaders = draining.unloaders + unloader
            turn.put(replace(model, phase=replace(draining, until_s=sooner_s, unloaders=unloaders)))
        case phases.Unloading() as unloading:  # on its way out; its end answers the ticket
            unloaders = unloading.unloaders + unloader
            turn.put(replace(model, phase=replace(unloading, unloaders=unloaders)))
        case _ as never:
            assert_never(never)


def _shut_down(turn: Turn, grace_s: float) -> None:
    turn.state = replace(turn.state, stopping=True)
    until_s = turn.now_s + grace_s
    for before in turn.models():
        model = turn.refuse_waiters(before, e.ShuttingDown())
        match model.phase:
            case phases.Queued():
                turn.end(model, phases.UNLOADED)
            case phases.Loading():
                turn.stop_worker(model, StopReason.SHUTDOWN)
            case phases.Ready() as ready:
                turn.drain(model, ready, until_s=until_s, reason=StopReason.SHUTDOWN)
            case phases.Draining() as draining:
                sooner_s = min(until_s, draining.until_s)
                ended = replace(draining, until_s=sooner_s, reason=StopReason.SHUTDOWN)
                turn.put(replace(model, phase=ended))
            case phases.Unloaded() | phases.Failed() | phases.Unloading():
                pass
            case _ as never:
                assert_never(never)


# --- what workers report -------------------------------------------------------------------------


def _handle_report(turn: Turn, event: Report) -> None:
    model = turn.state.by_worker(event.worker)
    if model is None:
        return
    match event, model.phase:
        case ev.Progressed(_, progress), phases.Loading() as loading:
            turn.put(replace(model, phase=replace(loading, progress=progress)))
        case ev.Shrunk(), _:
            note_shrunk(turn, model)
        case ev.Measured(_, figures), phases.Ready() as ready:
            _learn(turn, model, ready, figures)
        case ev.Ready(), phases.Loading() as loading:
            model = replace(model, load_s=turn.now_s - loading.began_s)
            ready = phases.Ready(loading.worker, loading.plan, since_s=turn.now_s)
            turn.serve_waiters(model, ready, loading.demand.waiters)
        case ev.LoadFailed(_, error), phases.Loading():
            turn.fail(turn.refuse_waiters(model, error), error)
        case ev.WorkerDied(_, error), phases.Ready():
            replace_dead(turn, model, error)
        case ev.WorkerDied(), phases.Draining():
            turn.end(model, phases.UNLOADED)
        case ev.Unloaded(), phases.Unloading() as unloading:
            end_unload(turn, model, unloading)
        case _:
            pass  # late news of a worker that is being stopped; Unloaded will come


def _learn(turn: Turn, model: Model, ready: phases.Ready, figures: Figures) -> None:
    """Reckon with what a model takes from now on, and remember it for its next load."""
    known = learn(model.measured, ready.plan.choice.way, figures)
    ready = replace(ready, plan=correct(ready.plan, known))
    turn.put(replace(model, measured=known, phase=ready))
