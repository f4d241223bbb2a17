"""When memory is measured for the scheduler, and what of it the scheduler is told."""

from __future__ import annotations

from mlxd_controller.core import events as ev
from mlxd_controller.core.state import COLD, Phase, State
from mlxd_controller.ports import DeviceProbe
from mlxd_controller.workers import Workers


def memory_read(probe: DeviceProbe, workers: Workers) -> ev.MemoryRead:
    """Return what the devices have now, and what workers last said that they hold."""
    return ev.MemoryRead(probe.read(workers.pids()), workers.arrays())


def counts_on_memory(state: State, event: ev.Event) -> bool:
    """Return whether the decision on `event` may begin a load, or have memory given back."""
    match event:
        case ev.Arrived() | ev.LoadAsked():
            model = state.models.get(event.digest)
            return model is None or model.phase in COLD
        case ev.Adopted() | ev.Ready() | ev.Shrunk():
            return True
        case ev.Unloaded() | ev.LoadFailed() | ev.WorkerDied():
            return True
        case ev.MemoryRead() | ev.Progressed():
            return False
        case _:
            queued = any(model.phase is Phase.QUEUED for model in state.models.values())
            return queued or bool(state.pressed)
