"""Which devices there are, and what becomes of the models where one is lost or comes back. Pure.

Invariants:
- From the decision on that hears of a device's loss nothing is sent to what ran there. The edge
  ends that itself; what it says of it later is news of former workers, which nobody believes.
- A device that comes back is empty, but for workers that are adopted (`Adopted`). What others
  hold there is in its figures: taken, or usable where a launch frees it first.
- What lives on a device that is no longer spoken of goes on living, and counts on none.
"""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core.ends import end_lost
from mlxd_controller.core.events import MemoryRead
from mlxd_controller.core.placement.pressure import note_memory
from mlxd_controller.core.placement.queueing import plan_anew
from mlxd_controller.core.state import State
from mlxd_controller.core.turn import Turn


def note_devices(turn: Turn, event: MemoryRead) -> None:
    """Take in a measurement; where it tells of other devices, have models end and be planned."""
    before = turn.state
    turn.state = replace(
        before,
        devices=event.devices,
        arrays=event.arrays,
        prefix_reload_s=event.prefix_reload_s,
    )
    if _reach(before) != _reach(turn.state):
        plan_anew(turn)
        _end_lost(turn)
    note_memory(turn)


def _reach(state: State) -> frozenset[tuple[str, str, int, bool]]:
    """Return what plans are made for: a device of one name may be of another machine now."""
    return frozenset(
        (device.name, device.node, device.budget_bytes, device.lost) for device in state.devices
    )


def _end_lost(turn: Turn) -> None:
    for device in turn.state.devices:
        for model in turn.models() if device.lost else ():
            if turn.state.lives_on(model, device):
                end_lost(turn, model, device.node or device.name)
