"""Who gets memory next: each model that waits for it gets a start, room, or a claim. Pure.

Invariants:
- A load starts only on a device where its need fits into what is usable less what all models that
  live there count. Nobody is evicted, and nobody waits, for what only an open prefix cache takes.
- Of the devices where a model fits it goes to the one with most room; if it fits on none it waits
  for who leaves already; else those are evicted, on one device, who are the cheapest of all.
- Nobody is evicted for a model that would not fit afterwards, nor more than is needed.
- Earlier places first: a later one may overtake only into room that no earlier one is waiting for.
  One that waits for models in use is overtaken for OVERTAKEN_MAX_S; then what comes free is its,
  and models in use are held for it.
- A GPU takes one load at a time, and none while a worker is leaving it; other GPUs go on. No load
  begins on a device that is above its marks.
"""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core import fit
from mlxd_controller.core.actions import StartLoad
from mlxd_controller.core.holding import hold_for
from mlxd_controller.core.homes import Home, Line, homes_of
from mlxd_controller.core.queueing import backs_off, look_again_s, stuck, unstuck
from mlxd_controller.core.room import busy_device
from mlxd_controller.core.state import Model, Phase, Progress, StopReason
from mlxd_controller.core.turn import Turn
from mlxd_controller.core.victims import candidates, cheapest


def place_all(turn: Turn) -> None:
    """Start, or make room for, or refuse each queued model, in the order of their places."""
    claimed_bytes: dict[str, int] = {}
    claimed_slots = 0
    queued = [model for model in turn.models() if model.phase is Phase.QUEUED]
    if not queued:
        return
    for position, model in enumerate(sorted(queued, key=lambda m: m.queued_at), start=1):
        if backs_off(turn, model):
            continue
        line = Line(claimed_bytes, claimed_slots, position)
        home = _place(turn, turn.state.models[model.digest], line)
        if home is not None:
            name = home.device.name
            claimed_bytes[name] = claimed_bytes.get(name, 0) + home.plan.least_bytes
            claimed_slots += 1
    again_s = look_again_s(turn.state, turn.now_s)
    if again_s != turn.state.look_again_s:
        turn.state = replace(turn.state, look_again_s=again_s)


def _place(turn: Turn, model: Model, line: Line) -> Home | None:
    """Return where `model` has a claim on what becomes free, if it goes on waiting with one."""
    homes = homes_of(turn.state, model, line)
    fitting = [home for home in homes if home.fits]
    if fitting and fitting[0].device.name in turn.state.pressed:
        return fitting[0] if stuck(turn, model, line.position) else None
    for home in fitting:
        if not busy_device(turn.state, home.device):
            _start(turn, model, home.plan.within(home.free_bytes))
            return None
    awaited = fitting or [home for home in homes if home.comes]
    if awaited:
        unstuck(turn, model)
        return awaited[0]
    return _make_room(turn, model, homes, line)


def _make_room(turn: Turn, model: Model, homes: list[Home], line: Line) -> Home | None:
    """Evict the cheapest that are enough, or have the model wait for those in use."""
    shorts = [home.coming for home in homes]
    chosen = cheapest(turn.state, candidates(turn.state, turn.now_s), shorts)
    if chosen is None:
        if not stuck(turn, model, line.position):
            return None
        return _home_on(homes, hold_for(turn, shorts))
    unstuck(turn, model)
    device, victims = chosen
    for victim in victims:
        turn.stop_worker(turn.state.models[victim.digest], StopReason.ROOM)
    return _home_on(homes, device.name)


def _home_on(homes: list[Home], name: str | None) -> Home:
    """Return the home on the device of this name; the one with most room where there is none."""
    return next((home for home in homes if home.device.name == name), homes[0])


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
            plans=(),
            worker=worker,
            stuck=False,
            backing_off=False,
            before=None,
            load_began_s=turn.now_s,
            error=None,
            progress=Progress("starting", 0, model.facts.stored_bytes),
        )
    )
