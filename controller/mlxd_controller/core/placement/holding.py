"""Models in use that take no new request for a while, so that they become idle. Pure.

A model that is never without a request would never be evicted, and whoever waits for its memory
would be refused again and again.

Invariants:
- Held are only ready models that may be evicted, for one that has been overtaken for long enough;
  no more of them than make enough room together with those that are idle, on one device.
- A hold lasts at most HOLD_MAX_S, ends when nobody waits for it any more, and the same model is not
  held again within HOLD_PAUSE_S: its own requests must not starve either.
"""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core.phases import Hold, Queued, Ready, lies_ahead
from mlxd_controller.core.placement.victims import Short, candidates, cheapest
from mlxd_controller.core.state import Model
from mlxd_controller.core.turn import Turn
from mlxd_shared import config


def overtaken_s(queued: Queued) -> float:
    """Return from when on nobody goes before a model that waits for models in use."""
    return queued.waits_since_s + config.OVERTAKEN_MAX_S


def hold_for(turn: Turn, shorts: list[Short]) -> str | None:
    """Hold the cheapest models that are enough, if any are; those that are held stay first.

    Return the device on which they are.
    """
    may_go = candidates(turn.state, turn.now_s, in_use=True)
    known = [model for model in may_go if model.idle or model.held]
    chosen = cheapest(turn.state, known, shorts)
    if chosen is None:
        more = [model for model in may_go if model not in known]
        known += [model for model in more if not lies_ahead(model.hold_again_s, turn.now_s)]
        chosen = cheapest(turn.state, known, shorts)
    if chosen is None:
        return None
    for victim in chosen[1]:
        _hold(turn, turn.state.models[victim.digest])
    return chosen[0].name


def _hold(turn: Turn, model: Model) -> None:
    ready = model.phase
    assert isinstance(ready, Ready)
    if ready.hold is not None or lies_ahead(model.hold_again_s, turn.now_s):
        return
    until_s = turn.now_s + config.HOLD_MAX_S
    held = replace(ready, hold=Hold(until_s))
    turn.put(replace(model, phase=held, hold_again_s=until_s + config.HOLD_PAUSE_S))


def end_holds(turn: Turn) -> None:
    """Release held models whose time is over, that became pinned, or that nobody waits for."""
    awaited = any(_has_claim(queued, turn.now_s) for _, queued in turn.state.queue())
    for model in turn.models():
        match model.phase:
            case Ready(hold=Hold() as hold) as ready:
                if not awaited or model.pinned or turn.now_s >= hold.until_s:
                    turn.serve_waiters(model, ready, hold.demand.waiters)
            case _:
                pass


def _has_claim(queued: Queued, now_s: float) -> bool:
    return queued.stuck and now_s >= overtaken_s(queued)
