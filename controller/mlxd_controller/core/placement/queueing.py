"""The queue of models that wait for memory: who enters, who is refused, and with what error. Pure.

Invariants:
- A model has one place however many wait for it, and keeps it while anybody waits.
- Nobody waits for models in use for longer than ROOM_WAIT_MAX_S.
- A load that is refused leaves no trace of its options.
- The plans of who waits are for devices that are there. Where these become others, all are planned
  anew; who could live on lost ones alone is refused at once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mlxd_controller.core.actions import Refuse
from mlxd_controller.core.demand import Demand, Fixed, Waiter, Want
from mlxd_controller.core.phases import UNLOADED, Queued, lies_ahead
from mlxd_controller.core.placement.holding import overtaken_s
from mlxd_controller.core.placement.homes import plans_for
from mlxd_controller.core.placement.room import room_of
from mlxd_controller.core.state import Model, State
from mlxd_controller.core.turn import Turn
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, NoRoom


def enqueue(turn: Turn, model: Model, demand: Demand) -> Model:
    """Plan a load of `model` and give it a place in the queue, or refuse all who wait for it."""
    plans = plans_for(model, model.spec, turn.state.devices)
    if isinstance(plans, MlxdError):
        return _refuse(turn, model, demand, plans)
    place = turn.state.next_place
    turn.state = replace(turn.state, next_place=place + 1)
    queued = Queued(plans, place, since_s=turn.now_s, demand=demand, error=model.error)
    return turn.put(replace(model, phase=queued))


def plan_anew(turn: Turn) -> None:
    """Plan all queued models for the devices that there are now, or refuse all who wait for one.

    Each keeps its place.
    """
    for model, queued in turn.state.queue():
        plans = plans_for(model, model.spec, turn.state.devices)
        if isinstance(plans, MlxdError):
            _refuse(turn, model, queued.demand, plans)
        else:
            turn.put(replace(model, phase=replace(queued, plans=plans)))


def place_of(state: State, queued: Queued) -> int:
    """Return the place of a queued model in the queue for memory, 1 for the next."""
    return 1 + sum(other.place < queued.place for _, other in state.queue())


def no_room(state: State, model: Model, queued: Queued, position: int) -> NoRoom:
    """Return what to tell those who wait for a queued model in vain."""
    plans = [plan.within(0) for plan in queued.plans]
    places = [(plan, state.device_named(plan.device)) for plan in plans]
    here = [(plan, device) for plan, device in places if device is not None]
    plan, device = max(here, key=lambda pair: _free_bytes(state, pair[1]) - pair[0].need_bytes)
    return NoRoom(
        model.name,
        plan.need_bytes,
        _free_bytes(state, device),
        config.NO_ROOM_RETRY_AFTER_S,
        position,
        device.reserve_bytes,
        *plan.term_bytes,
    )


def _free_bytes(state: State, device: Device) -> int:
    return 0 if state.is_pressed(device) else max(0, room_of(state, device).free_bytes)


def backs_off(turn: Turn, model: Model, queued: Queued) -> bool:
    """Note and return whether a model has to wait after failures; it has no claim meanwhile."""
    waiting = lies_ahead(model.retry_s, turn.now_s)
    if waiting != queued.backing_off:
        turn.put(replace(model, phase=replace(queued, backing_off=waiting, stuck=False)))
    return waiting


def wait_or_refuse(turn: Turn, model: Model, queued: Queued, position: int) -> bool:
    """Have a model wait for those in use; refuse who has waited too long.

    Return whether it stays, and has been overtaken for long enough to have a claim.
    """
    overtaken = turn.now_s >= overtaken_s(queued)
    if turn.now_s >= queued.gives_up_s:
        model = _send_away(turn, model, queued, no_room(turn.state, model, queued, position))
        if not isinstance(model.phase, Queued):
            return False
        queued = model.phase
    if not queued.stuck:
        turn.put(replace(model, phase=replace(queued, stuck=True)))
    return overtaken


def unstuck(turn: Turn, model: Model, queued: Queued) -> None:
    """Note that room for `model` is being made, or is there."""
    if queued.stuck:
        turn.put(replace(model, phase=replace(queued, stuck=False)))


def look_again_s(state: State, now_s: float) -> float:
    """Return the next moment at which time alone offers more to those who are stuck."""
    times = [overtaken_s(queued) for _, queued in state.queue() if queued.stuck]
    for model, ready in state.ready():
        if not model.pinned:
            times.append(ready.since_s + state.age_min_s)
            if model.hold_again_s is not None:
                times.append(model.hold_again_s)
    return min((moment for moment in times if moment > now_s), default=math.inf)


def _send_away(turn: Turn, model: Model, queued: Queued, error: NoRoom) -> Model:
    """Refuse those who have waited too long; the queue is left when nobody stays."""
    demand = queued.demand
    overdue = {w.ticket for w in demand.waiters if _is_overdue(w, turn.now_s)}
    staying = tuple(waiter for waiter in demand.waiters if waiter.ticket not in overdue)
    if not staying:
        return _refuse(turn, model, demand, error)
    for ticket in sorted(overdue):
        turn.do(Refuse(ticket, error))
    loads = {waiter.ticket for waiter in demand.waiters if waiter.want is Want.LOAD}
    if not loads & overdue or loads - overdue:
        return turn.put(
            replace(model, phase=replace(queued, demand=replace(demand, waiters=staying)))
        )
    # The options of a load that is refused go with it; those who stay get the model as it was.
    model = enqueue(turn, _restore(model, demand.before), Demand(staying))
    if not isinstance(model.phase, Queued):
        return model
    own_place = replace(model.phase, place=queued.place, since_s=queued.since_s)
    return turn.put(replace(model, phase=own_place))


def _is_overdue(waiter: Waiter, now_s: float) -> bool:
    return now_s >= waiter.since_s + config.ROOM_WAIT_MAX_S


def _refuse(turn: Turn, model: Model, demand: Demand, error: MlxdError) -> Model:
    """Send everybody away, and leave no trace of the options that they asked for."""
    for waiter in demand.waiters:
        turn.do(Refuse(waiter.ticket, error))
    return turn.end(_restore(model, demand.before), UNLOADED)


def _restore(model: Model, before: Fixed | None) -> Model:
    """Return the model with what was fixed before the load that has not begun."""
    if before is None:
        return model
    return replace(model, spec=before.spec, pinned=before.pinned, keep_alive_s=before.keep_alive_s)
