"""The queue of models that wait for memory: who enters, who is sent away, what they are told. Pure.

Invariants:
- A model has one place however many wait for it, and keeps it while anybody waits.
- Nobody waits for models in use for longer than ROOM_WAIT_MAX_S.
- A load that is refused leaves no trace of its options.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mlxd_controller.core.actions import Refuse
from mlxd_controller.core.holding import overtaken_s
from mlxd_controller.core.homes import plans_for
from mlxd_controller.core.room import room_of
from mlxd_controller.core.state import Model, Phase, State, Want
from mlxd_controller.core.turn import Turn
from mlxd_shared import config
from mlxd_shared.errors import MlxdError, ModelTooLarge, NoRoom


def enqueue(turn: Turn, model: Model) -> Model:
    """Plan a load of `model` and give it a place in the queue, or refuse all who wait for it."""
    plans = plans_for(model, model.spec, turn.state.devices)
    if isinstance(plans, ModelTooLarge):
        return _refuse(turn, model, plans)
    place = turn.state.next_place
    turn.state = replace(turn.state, next_place=place + 1)
    return turn.put(
        replace(
            model,
            phase=Phase.QUEUED,
            plan=plans[0],
            plans=plans,
            queued_at=place,
            queued_s=turn.now_s,
            stuck=False,
        )
    )


def place_of(state: State, model: Model) -> int:
    """Return the place of a queued model in the queue for memory, 1 for the next."""
    ahead = (m for m in state.models.values() if m.phase is Phase.QUEUED)
    return 1 + sum(other.queued_at < model.queued_at for other in ahead)


def no_room(state: State, model: Model, position: int) -> NoRoom:
    """Return what to tell those who wait for a queued model in vain."""
    plan, free_bytes = max(
        ((plan.within(0), _free_bytes(state, plan.device)) for plan in model.plans),
        key=lambda pair: pair[1] - pair[0].need_bytes,
    )
    return NoRoom(
        model.name,
        plan.need_bytes,
        free_bytes,
        config.NO_ROOM_RETRY_AFTER_S,
        position,
        state.device_named(plan.device).reserve_bytes,
        *plan.term_bytes,
    )


def _free_bytes(state: State, name: str) -> int:
    device = state.device_named(name)
    return 0 if device.name in state.pressed else max(0, room_of(state, device).free_bytes)


def backs_off(turn: Turn, model: Model) -> bool:
    """Note and return whether a model has to wait after failures; it has no claim meanwhile."""
    waiting = turn.now_s < model.retry_s
    if waiting != model.backing_off:
        turn.put(replace(model, backing_off=waiting, stuck=False))
    return waiting


def stuck(turn: Turn, model: Model, position: int) -> bool:
    """Have a model wait for those in use; refuse who has waited too long.

    Return whether it stays, and has been overtaken for long enough to have a claim.
    """
    overtaken = turn.now_s >= overtaken_s(model)
    if turn.now_s >= model.gives_up_s:
        model = _send_away(turn, model, no_room(turn.state, model, position))
        if model.phase is not Phase.QUEUED:
            return False
    if not model.stuck:
        turn.put(replace(model, stuck=True))
    return overtaken


def unstuck(turn: Turn, model: Model) -> None:
    """Note that room for `model` is being made, or is there."""
    if model.stuck:
        turn.put(replace(model, stuck=False))


def look_again_s(state: State, now_s: float) -> float:
    """Return the next moment at which time alone offers more to those who are stuck."""
    times = []
    for model in state.models.values():
        if model.phase is Phase.READY and not model.pinned:
            times += [model.ready_s + state.age_min_s, model.hold_again_s]
        elif model.stuck:
            times.append(overtaken_s(model))
    return min((moment for moment in times if moment > now_s), default=math.inf)


def _send_away(turn: Turn, model: Model, error: NoRoom) -> Model:
    """Refuse those who have waited too long; the queue is left when nobody stays."""
    overdue = {w.ticket for w in model.waiters if turn.now_s >= w.since_s + config.ROOM_WAIT_MAX_S}
    staying = tuple(waiter for waiter in model.waiters if waiter.ticket not in overdue)
    if not staying:
        return _refuse(turn, model, error)
    for ticket in sorted(overdue):
        turn.do(Refuse(ticket, error))
    loads = {waiter.ticket for waiter in model.waiters if waiter.want is Want.LOAD}
    if not loads & overdue or loads - overdue:
        return turn.put(replace(model, waiters=staying))
    # The options of a load that is refused go with it; those who stay get the model as it was.
    place, since_s = model.queued_at, model.queued_s
    model = enqueue(turn, _as_before(replace(model, waiters=staying, wanted=False)))
    return turn.put(replace(model, queued_at=place, queued_s=since_s))


def _refuse(turn: Turn, model: Model, error: MlxdError) -> Model:
    """Send everybody away, and leave no trace of the options that they asked for."""
    model = _as_before(turn.refuse_waiters(model, error))
    return turn.gone(model, Phase.UNLOADED, None)


def _as_before(model: Model) -> Model:
    """Return the model with what was fixed before the load that has not begun."""
    before = model.before
    if before is None:
        return model
    return replace(
        model,
        spec=before.spec,
        pinned=before.pinned,
        keep_alive_s=before.keep_alive_s,
        before=None,
    )
