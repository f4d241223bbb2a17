"""Who gets memory next: the queue of models that wait for it, and what is evicted for them. Pure.

Invariants:
- A load starts only when its need fits into what is usable less what all resident models reserve.
  Nobody is evicted, and nobody waits, for what only an open prefix cache would take.
- Nobody is evicted for a model that would not fit afterwards, nor more than is needed.
- Earlier places first: a later one may overtake only into room that no earlier one is waiting for.
  One that waits for models in use is overtaken for OVERTAKEN_MAX_S; then what comes free is its.
  After that models in use are held for it: who comes waits, for at most HOLD_MAX_S, so that they
  become idle. It cannot starve, and neither can they: nobody is held again within HOLD_PAUSE_S.
- Nobody waits for models in use for longer than ROOM_WAIT_MAX_S.
- A GPU takes one load at a time, and none while a worker is leaving it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mlxd_controller.core import evict, fit, reuse
from mlxd_controller.core.actions import Refuse, StartLoad
from mlxd_controller.core.state import Model, Phase, Progress, State, StopReason, Want
from mlxd_controller.core.turn import Turn
from mlxd_shared import config
from mlxd_shared.errors import MlxdError, ModelTooLarge, NoRoom

RETRY_AFTER_S = 2.0
"""What a client that found no room should wait: about the length of a short stream."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes and model slots. `coming` is what models on their way out will give back."""

    free_bytes: int
    free_slots: int
    coming_bytes: int
    coming_slots: int


def room_of(state: State) -> Room:
    """Return what is free now and what is about to be."""
    free_bytes = state.device.usable_bytes
    free_slots = len(state.models) + 1 if state.max_loaded is None else state.max_loaded
    coming_bytes = coming_slots = 0
    for model in state.models.values():
        nbytes = model.reserved_bytes
        if not nbytes:
            continue
        free_bytes -= nbytes
        free_slots -= 1
        if model.phase is Phase.DRAINING or model.phase is Phase.UNLOADING:
            coming_bytes += nbytes
            coming_slots += 1
    return Room(free_bytes, free_slots, coming_bytes, coming_slots)


def busy_device(state: State) -> bool:
    """Return whether a load must wait for another load, or for the end of a worker, to be over.

    What a load takes of a GPU at its peak is in no figure until it is over, and what a worker held
    is given back by the driver only when its process is gone. Host memory is the kernel's account.
    """
    moving = (Phase.LOADING, Phase.UNLOADING)
    gpu = state.device.kind != "cpu"
    return gpu and any(model.phase in moving for model in state.models.values())


def victims_of(state: State, now_s: float = math.inf) -> tuple[evict.Victim, ...]:
    """Return the models that may be evicted at `now_s`; by default, all but the busy and pinned."""
    return _offered(state, _candidates(state, now_s))


def _candidates(state: State, now_s: float, *, in_use: bool = False) -> list[Model]:
    """Return the models that may be evicted, or might be if nobody used them (`in_use`)."""
    return [
        model
        for model in state.models.values()
        if (model.idle or (in_use and model.phase is Phase.READY))
        and not model.pinned
        and now_s >= model.ready_s + state.age_min_s
    ]


def _offered(state: State, candidates: list[Model]) -> tuple[evict.Victim, ...]:
    # All usages decay alike, so that their shares are the same now as at the last use of any.
    last_s = max((model.usage.at_s for model in state.models.values()), default=0.0)
    uses = reuse.total((model.usage for model in state.models.values()), last_s)
    return tuple(
        evict.Victim(
            model.digest,
            model.reserved_bytes,
            model.last_used_s,
            cost=reuse.cost(
                model.load_s, reuse.requests_ahead(model.usage, total_uses=uses, now_s=last_s)
            ),
            priority=model.spec.priority or 0,
        )
        for model in candidates
    )


def _look_again_s(state: State, now_s: float) -> float:
    """Return the next moment at which time alone offers more to those who are stuck."""
    times = []
    for model in state.models.values():
        if model.phase is Phase.READY and not model.pinned:
            times += [model.ready_s + state.age_min_s, model.hold_again_s]
        elif model.stuck:
            times.append(model.waits_since_s + config.OVERTAKEN_MAX_S)
    return min((moment for moment in times if moment > now_s), default=math.inf)


def too_large(model: Model, plan: fit.Plan, device: fit.Device) -> ModelTooLarge | None:
    """Return why `plan` can never fit, whoever is evicted."""
    if plan.need_bytes <= device.budget_bytes:
        return None
    hint = " or ".join(fit.suggestions(model.facts, plan, device))
    return ModelTooLarge(
        model.name, plan.need_bytes, device.budget_bytes, device.reserve_bytes, f"it needs {hint}"
    )


def place_all(turn: Turn) -> None:
    """Start, or make room for, or refuse each queued model, in the order of their places."""
    claimed_bytes = claimed_slots = 0
    queued = [model for model in turn.models() if model.phase is Phase.QUEUED]
    if not queued:
        return
    for position, model in enumerate(sorted(queued, key=lambda m: m.queued_at), start=1):
        if _backs_off(turn, model):
            continue
        line = Line(claimed_bytes, claimed_slots, position)
        if _place(turn, turn.state.models[model.digest], line):
            assert model.plan is not None
            claimed_bytes += model.plan.least_bytes
            claimed_slots += 1
    look_again_s = _look_again_s(turn.state, turn.now_s)
    if look_again_s != turn.state.look_again_s:
        turn.state = replace(turn.state, look_again_s=look_again_s)


@dataclass(frozen=True, slots=True)
class Line:
    """What earlier models in the queue have a claim on, and the place after them (1: none)."""

    claimed_bytes: int
    claimed_slots: int
    position: int


def _backs_off(turn: Turn, model: Model) -> bool:
    """Note and return whether a model has to wait after failures; it has no claim meanwhile."""
    waiting = turn.now_s < model.retry_s
    if waiting != model.backing_off:
        turn.put(replace(model, backing_off=waiting, stuck=False))
    return waiting


def _place(turn: Turn, model: Model, line: Line) -> bool:
    """Return whether `model` goes on waiting, with a claim on what becomes free."""
    assert model.plan is not None
    claimed_bytes, claimed_slots = line.claimed_bytes, line.claimed_slots
    room = room_of(turn.state)
    short_bytes = model.plan.least_bytes + claimed_bytes - room.free_bytes
    short_slots = 1 + claimed_slots - room.free_slots
    if short_bytes <= 0 and short_slots <= 0:
        if busy_device(turn.state):
            _unstuck(turn, model)
            return True
        _start(turn, model, model.plan.within(room.free_bytes - claimed_bytes))
        return False
    short_bytes -= room.coming_bytes
    short_slots -= room.coming_slots
    if short_bytes <= 0 and short_slots <= 0:
        _unstuck(turn, model)
        return True
    chosen = _choose(turn, _candidates(turn.state, turn.now_s), short_bytes, short_slots)
    if chosen is None:
        first = _stuck(turn, model, line.position)
        if first:
            _hold_for(turn, short_bytes, short_slots)
        return first
    _unstuck(turn, model)
    for victim in chosen:
        turn.stop_worker(turn.state.models[victim.digest], StopReason.ROOM)
    return True


def _choose(
    turn: Turn, candidates: list[Model], short_bytes: int, short_slots: int
) -> tuple[evict.Victim, ...] | None:
    enough = len(candidates) >= short_slots
    if not enough or sum(model.reserved_bytes for model in candidates) < short_bytes:
        return None  # the usual case while models are in use: what they cost need not be known
    offered = _offered(turn.state, candidates)
    return evict.choose(offered, shortfall_bytes=short_bytes, shortfall_slots=short_slots)


def _hold_for(turn: Turn, short_bytes: int, short_slots: int) -> None:
    """Hold models in use, so that they become idle for one that has waited long.

    A model that is never without a request would otherwise never be evicted. Held for a bounded
    time, and not again soon: its own requests must not starve either.
    """
    candidates = [
        model
        for model in _candidates(turn.state, turn.now_s, in_use=True)
        if model.idle or model.held or turn.now_s >= model.hold_again_s
    ]
    for victim in _choose(turn, candidates, short_bytes, short_slots) or ():
        model = turn.state.models[victim.digest]
        if model.held:
            continue
        until_s = turn.now_s + config.HOLD_MAX_S
        turn.put(replace(model, held_until_s=until_s, hold_again_s=until_s + config.HOLD_PAUSE_S))


def end_holds(turn: Turn) -> None:
    """Let held models go on whose time is over, or that nobody waits for any more."""
    held = [model for model in turn.models() if model.held]
    if not held:
        return
    awaited = any(model.stuck for model in turn.state.models.values())
    for model in held:
        if not awaited or turn.now_s >= model.held_until_s:
            turn.serve_waiters(model)


def no_room(state: State, model: Model, position: int) -> NoRoom:
    """Return what to tell those who wait for a queued model in vain."""
    assert model.plan is not None
    free_bytes = max(0, room_of(state).free_bytes)
    return NoRoom(model.name, model.plan.least_bytes, free_bytes, RETRY_AFTER_S, position)


def place_of(state: State, model: Model) -> int:
    """Return the place of a queued model in the queue for memory, 1 for the next."""
    ahead = (m for m in state.models.values() if m.phase is Phase.QUEUED)
    return 1 + sum(other.queued_at < model.queued_at for other in ahead)


def _stuck(turn: Turn, model: Model, position: int) -> bool:
    """Have a model wait for those in use; refuse who has waited too long. As `_place`."""
    overtaken_s = model.waits_since_s + config.OVERTAKEN_MAX_S
    if turn.now_s >= model.gives_up_s:
        model = _send_away(turn, model, no_room(turn.state, model, position))
        if model.phase is not Phase.QUEUED:
            return False
    if not model.stuck:
        turn.put(replace(model, stuck=True))
    return turn.now_s >= overtaken_s


def _unstuck(turn: Turn, model: Model) -> None:
    if model.stuck:
        turn.put(replace(model, stuck=False))


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


def _start(turn: Turn, model: Model, plan: fit.Plan) -> None:
    worker = turn.state.next_worker
    restart = "" if model.error is None else type(model.error).__name__
    turn.state = replace(turn.state, next_worker=worker + 1)
    turn.do(
        StartLoad(
            worker=worker,
            digest=model.digest,
            name=model.name,
            path=model.path,
            plan=plan,
            spec=model.spec,
            reason="load" if model.wanted else "request",
            restart=restart,
        )
    )
    turn.put(
        replace(
            model,
            phase=Phase.LOADING,
            plan=plan,
            worker=worker,
            stuck=False,
            backing_off=False,
            before=None,
            load_began_s=turn.now_s,
            error=None,
            progress=Progress("starting", 0, model.facts.stored_bytes),
        )
    )


def enqueue(turn: Turn, model: Model) -> Model:
    """Plan a load of `model` and give it a place in the queue, or refuse all who wait for it."""
    plan = fit.plan(model.facts, model.spec, turn.state.device)
    error = too_large(model, plan, turn.state.device)
    if error is not None:
        return _refuse(turn, model, error)
    place = turn.state.next_place
    turn.state = replace(turn.state, next_place=place + 1)
    return turn.put(
        replace(
            model, phase=Phase.QUEUED, plan=plan, queued_at=place, queued_s=turn.now_s, stuck=False
        )
    )
