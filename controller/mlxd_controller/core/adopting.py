"""A worker that ran before it was known here becomes the model's own, or is unloaded. Pure.

Invariants:
- Who stays fits, with all who stay, into its device's budget and into `max_loaded`; who comes
  first stays.
- Who does not stay is UNLOADING until it is gone: its memory counts, and its model is not loaded
  again before.
- One on a device that nobody knows is of no use; to one on a lost device nothing is said.
"""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core import phases
from mlxd_controller.core.actions import StopWorker
from mlxd_controller.core.events import Adopted
from mlxd_controller.core.state import Model, State
from mlxd_controller.core.turn import Turn
from mlxd_models.fit.plan import Device
from mlxd_models.fit.planner import correct
from mlxd_models.fit.terms import reckon


def adopt(turn: Turn, event: Adopted) -> None:
    """Take the worker in, as ready; stop it where there is no room for it."""
    state = turn.state
    turn.state = replace(state, next_worker=max(state.next_worker, event.worker + 1))
    device = state.device_named(event.device)
    if device is not None and device.lost:
        return
    keep_alive_s = event.spec.keep_alive_s
    if keep_alive_s is None:
        keep_alive_s = state.keep_alive_s
    model = state.models.get(event.digest) or Model(
        event.digest, event.name, event.path, event.facts, keep_alive_s
    )
    if device is None or not isinstance(model.phase, phases.Cold):
        # Nobody knows what it takes of which memory; or the model has another, or waits for one.
        turn.do(StopWorker(event.worker, event.digest, phases.StopReason.SURPLUS))
        return
    plan = correct(reckon(event.facts, device, event.choice), model.measured)
    model = replace(
        model,
        name=event.name,
        path=event.path,
        facts=event.facts,
        keep_alive_s=keep_alive_s,
        phase=phases.Ready(event.worker, plan, since_s=turn.now_s),
        spec=event.spec,
        configured=event.configured,
        pinned=bool(event.spec.pinned),
        last_used_s=turn.now_s,
        load_s=event.load_s,
    )
    if state.stopping or not _fits(state, device, plan.need_bytes):
        turn.stop_worker(model, phases.StopReason.SURPLUS)
    else:
        turn.put(model)


def _fits(state: State, device: Device, need_bytes: int) -> bool:
    """Return whether each rank's need fits beside all who stay: not those on their way out."""
    staying = [
        m for m in state.models.values() if isinstance(m.phase, phases.Loading | phases.Ready)
    ]
    if state.max_loaded is not None and len(staying) >= state.max_loaded:
        return False
    for name, ranks in device.parts.items():
        one = state.device_named(name)
        assert one is not None, "the group is of known devices"
        here = [model for model in staying if state.lives_on(model, one)]
        if one.models_max is not None and len(here) >= one.models_max:
            return False
        if state.reserved_on(one, here) + need_bytes * ranks > one.budget_bytes:
            return False
    return True
