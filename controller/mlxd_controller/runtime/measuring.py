"""When memory is measured for the scheduler, and what the scheduler is told of it.

Invariants:
- An event that begins a load, or follows the end of a worker, is decided with a fresh measurement.
  Other events may use one up to RECENT_S old: measuring reads a dozen small files while nobody is
  served.
- If none of those files can be opened, the last measurement stays in force.
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
"""How old a measurement may be that is only shown, or that decides on waiting alone."""
_MOVES_MEMORY = (ev.Adopted, ev.Ready, ev.Shrunk, ev.Unloaded, ev.LoadFailed, ev.WorkerDied)
_log = get_logger("memory")


class Measuring:
    """The last measurement of the devices. One owner: the runtime."""

    def __init__(self, probe: DeviceProbe, workers: Workers, clock: Clock) -> None:
        self._probe = probe
        self._workers = workers
        self._clock = clock
        self._read_s = -math.inf
        self._devices: tuple[Device, ...] = ()

    def now(self) -> ev.MemoryRead:
        """Measure the devices now; return that with what workers last reported to hold."""
        try:
            self._devices = self._probe.read(self._workers.pids())
        except OSError as error:
            if not self._devices:
                raise
            _log.warning("memory cannot be measured", reason=error.strerror)
        self._read_s = self._clock.now_s()
        return ev.MemoryRead(self._devices, self._workers.arrays(), self._workers.prefix_reloads())

    def recent(self) -> tuple[Device, ...] | None:
        """Return the last measurement if it is recent, else None."""
        return self._devices if self._clock.now_s() - self._read_s < RECENT_S else None

    def due(self, state: State, event: ev.Event) -> bool:
        """Return whether memory must be measured before `event` is decided."""
        if _begins_or_ends(state, event):
            return True
        if isinstance(event, ev.MemoryRead | ev.Progressed):
            return False
        queued = any(isinstance(model.phase, Queued) for model in state.models.values())
        return (queued or bool(state.pressed)) and self.recent() is None


def _begins_or_ends(state: State, event: ev.Event) -> bool:
    """Return whether `event` may begin a load, or follows a release of memory."""
    if isinstance(event, ev.Arrived | ev.LoadAsked):
        model = state.models.get(event.digest)
        return model is None or isinstance(model.phase, Cold)
    return isinstance(event, _MOVES_MEMORY)
