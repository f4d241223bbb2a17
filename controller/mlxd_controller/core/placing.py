"""Who gets memory next: the queue of models that wait for it, and what is evicted for them. Pure.

Invariants:
- A load starts only when its need fits into what is usable less what all resident models reserve.
  Nobody is evicted, and nobody waits, for what only an open prefix cache would take.
- Nobody is evicted for a model that would not fit afterwards, nor more than is needed.
- Earlier places first: a later one may overtake only into room that no earlier one is waiting for.
- A GPU takes one load at a time, and none while a worker is leaving it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxd_controller.core import evict, fit, reuse
from mlxd_controller.core.actions import StartLoad
from mlxd_controller.core.state import RESIDENT, Model, Phase, Progress, State, StopReason
from mlxd_controller.core.turn import Turn
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
    resident = [model for model in state.models.values() if model.phase in RESIDENT]
    leaving = [m for m in resident if m.phase in (Phase.DRAINING, Phase.UNLOADING)]
    slots = len(state.models) + 1 if state.max_loaded is None else state.max_loaded
    return Room(
        free_bytes=state.device.usable_bytes - sum(model.reserved_bytes for model in resident),
        free_slots=slots - len(resident),
        coming_bytes=sum(model.reserved_bytes for model in leaving),
        coming_slots=len(leaving),
    )


def busy_device(state: State) -> bool:
    """Return whether a load must wait for another load, or for the end of a worker, to be over.

    What a load takes of a GPU at its peak is in no figure until it is over, and what a worker held
    is given back by the driver only when its process is gone. Host memory is the kernel's account.
    """
    moving = (Phase.LOADING, Phase.UNLOADING)
    gpu = state.device.kind != "cpu"
    return gpu and any(model.phase in moving for model in state.models.values())


def victims_of(state: State) -> tuple[evict.Victim, ...]:
    """Return the models that may be evicted now, and what their absence would cost."""
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
        )
        for model in state.models.values()
        if model.idle and not model.pinned
    )


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
    for model in sorted(queued, key=lambda m: m.queued_at):
        if _place(turn, model, claimed_bytes=claimed_bytes, claimed_slots=claimed_slots):
            assert model.plan is not None
            claimed_bytes += model.plan.least_bytes
            claimed_slots += 1


def _place(turn: Turn, model: Model, *, claimed_bytes: int, claimed_slots: int) -> bool:
    """Return whether `model` goes on waiting, and so has a claim on what becomes free."""
    assert model.plan is not None
    room = room_of(turn.state)
    short_bytes = model.plan.least_bytes + claimed_bytes - room.free_bytes
    short_slots = 1 + claimed_slots - room.free_slots
    if short_bytes <= 0 and short_slots <= 0:
        if busy_device(turn.state):
            return True
        _start(turn, model, model.plan.within(room.free_bytes - claimed_bytes))
        return False
    short_bytes -= room.coming_bytes
    short_slots -= room.coming_slots
    if short_bytes <= 0 and short_slots <= 0:
        return True
    chosen = evict.choose(
        victims_of(turn.state), shortfall_bytes=short_bytes, shortfall_slots=short_slots
    )
    if chosen is None:
        _refuse(turn, model, _no_room(model, room))
        return False
    for victim in chosen:
        turn.stop_worker(turn.state.models[victim.digest], StopReason.ROOM)
    return True


def _no_room(model: Model, room: Room) -> NoRoom:
    assert model.plan is not None
    return NoRoom(model.name, model.plan.least_bytes, max(0, room.free_bytes), RETRY_AFTER_S)


def _refuse(turn: Turn, model: Model, error: MlxdError) -> Model:
    """Send everybody away, and leave no trace of the options that they asked for."""
    before = model.before
    refused = turn.gone(turn.refuse_waiters(model, error), Phase.UNLOADED, None)
    if before is None:
        return refused
    return turn.put(
        replace(
            refused,
            spec=before.spec,
            pinned=before.pinned,
            keep_alive_s=before.keep_alive_s,
        )
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
    return turn.put(replace(model, phase=Phase.QUEUED, plan=plan, queued_at=place))
