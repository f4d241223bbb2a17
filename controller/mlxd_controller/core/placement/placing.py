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
- What is said of a device holds for each of a group's: a model over several of them begins where
  all have room, and has a claim on all. While it waits for their loads alone, no later one begins
  there: they would never all be at rest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mlxd_controller.core.actions import StartLoad
from mlxd_controller.core.phases import Loading, Queued, StopReason
from mlxd_controller.core.placement.holding import hold_for
from mlxd_controller.core.placement.homes import Home, Line, homes_of
from mlxd_controller.core.placement.queueing import backs_off, look_again_s, unstuck, wait_or_refuse
from mlxd_controller.core.placement.room import busy_device
from mlxd_controller.core.placement.victims import candidates, cheapest
from mlxd_controller.core.state import Model
from mlxd_controller.core.turn import Turn
from mlxd_models.fit.plan import Plan
from mlxd_shared.domain.figures import LoadProgress


def place_all(turn: Turn) -> None:
    """Start, or make room for, or refuse each queued model, in the order of their places."""
    claimed_bytes: Counter[str] = Counter()
    claimed_places: Counter[str] = Counter()
    claimed_slots = 0
    awaited: frozenset[str] = frozenset()
    queue = turn.state.queue()
    if not queue:
        return
    for position, (model, queued) in enumerate(queue, start=1):
        if backs_off(turn, model, queued):
            continue
        line = Line(claimed_bytes, claimed_places, claimed_slots, awaited, position)
        home = _place(turn, turn.state.models[model.digest], line)
        if home is not None:
            claimed_slots += 1
            for name, ranks in home.device.parts.items():
                claimed_bytes[name] += home.plan.least_bytes * ranks
                claimed_places[name] += 1
            if home.fits and home.device.members and not turn.state.is_pressed(home.device):
                awaited |= home.device.parts.keys()
    again_s = look_again_s(turn.state, turn.now_s)
    if again_s != turn.state.look_again_s:
        turn.state = replace(turn.state, look_again_s=again_s)


def _place(turn: Turn, model: Model, line: Line) -> Home | None:
    """Return where `model` has a claim on what becomes free, if it goes on waiting with one."""
    queued = model.phase
    assert isinstance(queued, Queued)
    homes = homes_of(turn.state, queued, line)
    fitting = [home for home in homes if home.fits]
    if fitting and turn.state.is_pressed(fitting[0].device):
        return fitting[0] if wait_or_refuse(turn, model, queued, line.position) else None
    for home in fitting:
        at_rest = line.awaited.isdisjoint(home.device.parts)
        if at_rest and not busy_device(turn.state, home.device):
            _start(turn, model, queued, home.plan.within(home.free_bytes))
            return None
    awaited = fitting or [home for home in homes if home.comes]
    if awaited:
        unstuck(turn, model, queued)
        return awaited[0]
    return _make_room(turn, model, queued, homes, line)


def _make_room(
    turn: Turn, model: Model, queued: Queued, homes: list[Home], line: Line
) -> Home | None:
    """Evict the cheapest that are enough, or have the model wait for those in use."""
    shorts = [home.coming for home in homes]
    chosen = cheapest(turn.state, candidates(turn.state, turn.now_s), shorts)
    if chosen is None:
        if not wait_or_refuse(turn, model, queued, line.position):
            return None
        return _home_on(homes, hold_for(turn, shorts))
    unstuck(turn, model, queued)
    device, victims = chosen
    for victim in victims:
        turn.stop_worker(turn.state.models[victim.digest], StopReason.ROOM)
    return _home_on(homes, device.name)


def _home_on(homes: list[Home], name: str | None) -> Home:
    """Return the home on the device with this name, or else the one with the most room."""
    return next((home for home in homes if home.device.name == name), homes[0])


def _start(turn: Turn, model: Model, queued: Queued, plan: Plan) -> None:
    worker = turn.state.next_worker
    restart = "" if queued.error is None else type(queued.error).__name__
    turn.state = replace(turn.state, next_worker=worker + 1)
    turn.do(
        StartLoad(
            worker=worker,
            digest=model.digest,
            name=model.name,
            path=model.path,
            plan=plan,
            spec=model.spec,
            reason="load" if queued.demand.wanted else "request",
            restart=restart,
        )
    )
    loading = Loading(
        worker,
        plan,
        began_s=turn.now_s,
        demand=replace(queued.demand, before=None),
        progress=LoadProgress("starting", 0, model.facts.stored_bytes),
    )
    turn.put(replace(model, phase=loading))
