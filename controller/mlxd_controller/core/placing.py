"""Who gets memory next: each model that waits for it gets a start, room, or a claim. Pure.

Invariants:
- A load starts only when its need fits into what is usable less what all resident models count.
  Nobody is evicted, and nobody waits, for what only an open prefix cache would take.
- Nobody is evicted for a model that would not fit afterwards, nor more than is needed.
- Earlier places first: a later one may overtake only into room that no earlier one is waiting for.
  One that waits for models in use is overtaken for OVERTAKEN_MAX_S; then what comes free is its,
  and models in use are held for it.
- A GPU takes one load at a time, and none while a worker is leaving it. No load begins while memory
  is above its marks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxd_controller.core import fit
from mlxd_controller.core.actions import StartLoad
from mlxd_controller.core.holding import hold_for
from mlxd_controller.core.queueing import backs_off, look_again_s, stuck, unstuck
from mlxd_controller.core.room import busy_device, room_of
from mlxd_controller.core.state import Model, Phase, Progress, StopReason
from mlxd_controller.core.turn import Turn
from mlxd_controller.core.victims import candidates, choose


@dataclass(frozen=True, slots=True)
class Line:
    """What earlier models in the queue have a claim on, and the place after them (1: none)."""

    claimed_bytes: int
    claimed_slots: int
    position: int


def place_all(turn: Turn) -> None:
    """Start, or make room for, or refuse each queued model, in the order of their places."""
    claimed_bytes = claimed_slots = 0
    queued = [model for model in turn.models() if model.phase is Phase.QUEUED]
    if not queued:
        return
    for position, model in enumerate(sorted(queued, key=lambda m: m.queued_at), start=1):
        if backs_off(turn, model):
            continue
        line = Line(claimed_bytes, claimed_slots, position)
        if _place(turn, turn.state.models[model.digest], line):
            assert model.plan is not None
            claimed_bytes += model.plan.least_bytes
            claimed_slots += 1
    again_s = look_again_s(turn.state, turn.now_s)
    if again_s != turn.state.look_again_s:
        turn.state = replace(turn.state, look_again_s=again_s)


def _place(turn: Turn, model: Model, line: Line) -> bool:
    """Return whether `model` goes on waiting, with a claim on what becomes free."""
    assert model.plan is not None
    room = room_of(turn.state)
    short_bytes = model.plan.least_bytes + line.claimed_bytes - room.free_bytes
    short_slots = 1 + line.claimed_slots - room.free_slots
    if short_bytes <= 0 and short_slots <= 0:
        if turn.state.pressed:
            return stuck(turn, model, line.position)
        if busy_device(turn.state):
            unstuck(turn, model)
            return True
        _start(turn, model, model.plan.within(room.free_bytes - line.claimed_bytes))
        return False
    short_bytes -= room.coming_bytes
    short_slots -= room.coming_slots
    if short_bytes <= 0 and short_slots <= 0:
        unstuck(turn, model)
        return True
    idle = candidates(turn.state, turn.now_s)
    chosen = choose(turn.state, idle, short_bytes, short_slots)
    if chosen is None:
        first = stuck(turn, model, line.position)
        if first:
            hold_for(turn, short_bytes, short_slots)
        return first
    unstuck(turn, model)
    for victim in chosen:
        turn.stop_worker(turn.state.models[victim.digest], StopReason.ROOM)
    return True


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
