"""When memory is measured for the scheduler, and what of it the scheduler is told.

Invariants:
- Whatever begins a load, or follows the end of a worker, is decided on by a measurement of its own.
  Others make do with one that is RECENT_S old: it reads a dozen small files while nobody is served.
- Where the system lets none of them be opened, what was measured last holds on.
"""

from __future__ import annotations

import math

from mlxd_controller.core import events as ev
from mlxd_controller.core.phases import Cold, Queued
from mlxd_controller.core.state import State
from mlxd_controller.runtime.ports import Clock, DeviceProbe
from mlxd_controller.runtime.workers import Workers
from mlxd_models.fit.plan import Device
from mlxd_shared.ops.logs import get_logger

RECENT_S = 0.1
"""How old a measurement may be that shows the memory, or that decides on nothing but waiting."""
_log = get_logger("memory")


class Measuring:
    """What the devices had when they were last looked at. One owner: the runtime."""

    def __init__(self, probe: DeviceProbe, workers: Workers, clock: Clock) -> None:
        """Have measured nothing yet."""
        self._probe = probe
        self._workers = workers
        self._clock = clock
        self._read_s = -math.inf
        self._devices: tuple[Device, ...] = ()

    def now(self) -> ev.MemoryRead:
        """Return what the devices have now, and what workers last said that they hold."""
        try:
            self._devices = self._probe.read(self._workers.pids())
        except OSError as error:
            if not self._devices:
                raise
            _log.warning("memory cannot be measured", reason=error.strerror)
        self._read_s = self._clock.now_s()
        return ev.MemoryRead(self._devices, self._workers.arrays(), self._workers.prefix_reloads())

    def recent(self) -> tuple[Device, ...] | None:
        """Return what the devices had a moment ago; None where they were not looked at."""
        return self._devices if self._clock.now_s() - self._read_s < RECENT_S else None

    def due(self, state: State, event: ev.Event) -> bool:
        """Return whether memory is to be measured before `event` is decided on."""
        if _begins_or_ends(state, event):
            return True
        if isinstance(event, ev.MemoryRead | ev.Progressed):
            return False
        queued = any(isinstance(model.phase, Queued) for model in state.models.values())
        return (queued or bool(state.pressed)) and self.recent() is None


def _begins_or_ends(state: State, event: ev.Event) -> bool:
    """Return whether `event` may begin a load, or has memory given back."""
    match event:
        case ev.Arrived() | ev.LoadAsked():
            model = state.models.get(event.digest)
            return model is None or isinstance(model.phase, Cold)
        case ev.Adopted() | ev.Ready() | ev.Shrunk():
            return True
        case ev.Unloaded() | ev.LoadFailed() | ev.WorkerDied():
            return True
        case _:
            return False
