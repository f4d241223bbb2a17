"""Marks on memory, and what is given back where they are passed: shrink before evict. Pure.

The soft mark is what is usable: at it the reserve is whole. The hard mark lies HARD_MARK_FRACTION
of the budget above it. What counts is what workers hold by measure, not what they were promised.

Each device has marks of its own. What follows is said of one device and the models that live on it:
pressure on one leaves the others alone. A lost device has no marks: nobody there can be told.

Invariants:
- Nothing is done before the hard mark is passed, nor once memory is below the soft one again; in
  between no load begins.
- One order at a time, each judged by a new measurement, not by what the worker said of it.
- Workers shrink first, the idle before the busy, and the one first that was used longest ago.
  Models are evicted only when each worker has been told since the mark was passed, and only idle
  ones. No stream ends.
- A worker is told again only after SHRINK_PAUSE_S, or once memory has been below the soft mark.
- An answer that is late or lost is waited for no longer than SHRINK_TIMEOUT_S.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from mlxd_controller.core import phases
from mlxd_controller.core.actions import Shrink
from mlxd_controller.core.placement.victims import Short, candidates, choose
from mlxd_controller.core.state import Model, State
from mlxd_controller.core.turn import Turn
from mlxd_models.fit.plan import Device
from mlxd_shared import config


def above_hard_mark(state: State, device: Device) -> bool:
    """Return whether workers hold more than the hard mark."""
    return state.excess_on(device) > config.HARD_MARK_FRACTION * device.budget_bytes


def note_memory(turn: Turn) -> None:
    """Note whether the measurement that has just come passes a mark."""
    state = turn.state
    pressed = frozenset(device.name for device in state.devices if _is_pressed(state, device))
    if pressed == state.pressed:
        return
    turn.state = replace(state, pressed=pressed)
    for device in state.devices:
        if device.name in pressed - state.pressed:  # they may have kept much the last time
            _ask_again(turn, device)


def _is_pressed(state: State, device: Device) -> bool:
    was = device.name in state.pressed
    return state.excess_on(device) > 0 if was else above_hard_mark(state, device)


def _ask_again(turn: Turn, device: Device) -> None:
    for model, ready in turn.state.ready():
        if turn.state.lives_on(model, device) and ready.shrink_again_s is not None:
            turn.put(replace(model, phase=replace(ready, shrink_again_s=None)))


def note_shrunk(turn: Turn, model: Model) -> None:
    """Note that the worker of `model` has answered."""
    if isinstance(model.phase, phases.Ready | phases.Draining):
        turn.put(replace(model, phase=replace(model.phase, shrink_until_s=None)))


def _relieving(state: State, device: Device, now_s: float) -> bool:
    """Return whether memory is being released, so that what is held now means little."""
    return any(
        _gives_back(model.phase, now_s) and state.lives_on(model, device)
        for model in state.models.values()
    )


def _gives_back(phase: phases.Phase, now_s: float) -> bool:
    if isinstance(phase, phases.Ready | phases.Draining):
        return phases.lies_ahead(phase.shrink_until_s, now_s)
    return isinstance(phase, phases.Unloading)


def relieve(turn: Turn) -> None:
    """Have one model per device release memory if the marks demand it and none is about to."""
    for device in turn.state.devices:
        pressed = device.name in turn.state.pressed and not turn.state.stopping
        if pressed and not _relieving(turn.state, device, turn.now_s):
            _relieve(turn, device)
    again_s = _again_s(turn)
    if again_s != turn.state.relieve_again_s:
        turn.state = replace(turn.state, relieve_again_s=again_s)


def _relieve(turn: Turn, device: Device) -> None:
    candidate = _next_to_shrink(turn, device)
    if candidate is not None:
        _shrink(turn, *candidate)
    else:
        _evict(turn, device)


def _next_to_shrink(turn: Turn, device: Device) -> tuple[Model, phases.Ready] | None:
    candidates_here = [
        (model, ready)
        for model, ready in turn.state.ready()
        if turn.state.lives_on(model, device)
        and not phases.lies_ahead(ready.shrink_again_s, turn.now_s)
        and turn.state.arrays.get(ready.worker, 0) > 0
    ]
    return min(candidates_here, key=_shrink_rank, default=None)


def _shrink_rank(candidate: tuple[Model, phases.Ready]) -> tuple[bool, float, str]:
    model, ready = candidate
    return (bool(ready.leases), model.last_used_s, model.digest)


def _shrink(turn: Turn, model: Model, ready: phases.Ready) -> None:
    held_bytes = turn.state.arrays[ready.worker]
    # Each rank gives back what it is told to, and none is told again for a while.
    devices = Counter(ready.plan.devices)
    excess_bytes = max(
        -(-turn.state.excess_on(there) // devices[there.name])
        for there in turn.state.devices
        if there.name in devices
    )
    target_bytes = max(0, held_bytes - excess_bytes)
    turn.do(Shrink(ready.worker, model.digest, target_bytes))
    until_s = turn.now_s + config.SHRINK_TIMEOUT_S
    again_s = turn.now_s + config.SHRINK_PAUSE_S
    ready = replace(ready, shrink_until_s=until_s, shrink_again_s=again_s)
    turn.put(replace(model, phase=ready))


def _evict(turn: Turn, device: Device) -> None:
    """Evict the cheapest idle models that are enough; all of them where they are too few."""
    state = turn.state
    idle = [model for model in candidates(state, turn.now_s) if state.lives_on(model, device)]
    leaving = [model for model in turn.models() if isinstance(model.phase, phases.Draining)]
    excess_bytes = state.excess_on(device) - state.reserved_on(device, leaving)
    if excess_bytes <= 0:
        return
    chosen = choose(state, idle, Short(device, excess_bytes, 0))
    digests = [model.digest for model in idle] if chosen is None else [v.digest for v in chosen]
    for digest in sorted(digests):
        turn.stop_worker(turn.state.models[digest], phases.StopReason.PRESSURE)


def _again_s(turn: Turn) -> float:
    """Return the next moment at which time alone lets `relieve` do more; infinite: none."""
    if not turn.state.pressed:
        return math.inf
    times = [
        moment
        for _, ready in turn.state.ready()
        for moment in (
            ready.shrink_until_s,
            ready.shrink_again_s,
            ready.since_s + turn.state.age_min_s,
        )
    ]
    return min(
        (moment for moment in times if moment is not None and moment > turn.now_s),
        default=math.inf,
    )
