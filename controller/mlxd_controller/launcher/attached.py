"""Workers that others started: reached at an address, loaded and unloaded, but never ended.

Invariants:
- A load takes a worker on the machine that it was planned for, and no other. Unused models of the
  workers beside it are unloaded first: the plan counts their memory as free.
- A load waits long for a worker that has never answered, because it may still be starting, but only
  GONE_WAIT_S if all workers of its machine have answered before and have gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mlxd_controller.launcher.attached_link import AttachedLink
from mlxd_controller.launcher.attached_machines import AttachedMachines
from mlxd_controller.launcher.station import SILENCE_S_MAX, AttachedProcess, Station
from mlxd_shared import config
from mlxd_shared.domain.errors import WorkerStartFailed, WorkerTimedOut
from mlxd_shared.domain.figures import ModelState, WorkerFigures
from mlxd_shared.domain.units import timeout_of
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity
from mlxd_shared.wire.proof import Proof

GONE_WAIT_S = 10.0
"""How long a worker that has gone may take to come back, for instance in a restart."""

_log = get_logger("attached")


class AttachedLauncher:
    """Implements ports.Launcher over running workers; `run` must be running."""

    def __init__(
        self,
        workers: Sequence[tuple[str, str]],
        *,
        security: ChannelSecurity = PLAIN,
        wait_s: float = config.LOAD_STALL_TIMEOUT_S,
        gone_wait_s: float = GONE_WAIT_S,
        silence_s_max: float = SILENCE_S_MAX,
        restart_s: float = config.ROOM_WAIT_MAX_S,
    ) -> None:
        """Take (name, address) of each worker. A load waits `wait_s` for one that answers.

        gone_wait_s: how long a load waits if all workers of its machine have gone.
        silence_s_max: a worker silent for this long has gone, even if its connection stands.
        restart_s: how long a worker that has gone may take to return before it counts as lost: as
            long as requests wait for room.

        Raises:
            InvalidRequest, BadCredentials: see secure_channel.
        """
        self._wait_s = wait_s
        self._gone_wait_s = gone_wait_s
        self._security = security
        self._changed = asyncio.Event()
        self.stations = tuple(
            Station(
                name,
                address,
                security,
                self._changed,
                silence_s_max=silence_s_max,
                restart_s=restart_s,
            )
            for name, address in workers
        )
        self.machines = AttachedMachines(self.stations)

    async def run(self) -> None:
        """Watch every worker until cancelled; then close all connections.

        Raises:
            ExceptionGroup: a bug.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for station in self.stations:
                    tasks.create_task(station.follow())
        finally:
            for station in self.stations:
                await station.close()

    def leave(self) -> None:
        """From now on, leave a worker's model loaded when it is given back."""
        for station in self.stations:
            station.keeps_model = True

    async def launch(
        self,
        *,
        model: str,
        incarnation: str,  # noqa: ARG002 - the worker has its own
        device: str = "",
    ) -> AttachedProcess:
        """Take a free worker on `device`'s machine, waiting for one if need be.

        A worker keeps its own incarnation. One that has `model` ready is preferred, then an empty
        one. Unused models of other workers on that machine are unloaded.

        Raises:
            WorkerStartFailed: the machine is lost, or the device no longer exists.
            WorkerTimedOut: no free worker answered in time.

            Both give the reason for each worker.
        """
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        until_s: float | None = None
        try:
            async with asyncio.timeout(timeout_of(self._wait_s)):
                while (station := self._free(model, device)) is None:
                    if not self.machines.may_serve(device):
                        raise WorkerStartFailed(model, self._reasons())
                    if not self.machines.all_gone(device):
                        until_s = None
                    elif until_s is None:
                        until_s = now_s() + self._gone_wait_s
                    async with asyncio.timeout_at(until_s):
                        await self._changed.wait()
        except TimeoutError:
            lines = self._reasons()
            raise WorkerTimedOut(model, lines, now_s() - began_s, "; ".join(lines)) from None
        process = station.take()
        try:
            await self._unload_beside(station)
        except asyncio.CancelledError:
            await process.close()
            raise
        return process

    async def _unload_beside(self, taken: Station) -> None:
        """Unload the unused models of other workers on the same machine."""
        beside = next(m.stations for m in self.machines.look() if taken in m.stations)
        idle = [
            station
            for station in beside
            if station.process is None and station.figures and station.figures.model_name
        ]
        await asyncio.gather(*(station.take().close() for station in idle))

    def _reasons(self) -> tuple[str, ...]:
        reasons = ((s, s.problem if s.status is None else "in use") for s in self.stations)
        return tuple(f"worker {station.name}: {reason}" for station, reason in reasons)

    def connect(
        self,
        *,
        address: str,
        incarnation: str,
        digest: str,
        proof: Proof | None = None,  # noqa: ARG002 - an attached worker gives none
    ) -> AttachedLink:
        """Implements ports.Connect for a process that `launch` returned."""
        processes = (s.process for s in self.stations if s.address == address)
        process = next(p for p in processes if p is not None and p.incarnation == incarnation)
        return AttachedLink(process, digest=digest, security=self._security)

    async def wait_for_figures(self, *, wait_s: float) -> tuple[WorkerFigures, ...]:
        """Return what the workers report; wait at most `wait_s` for those that have not yet."""
        try:
            async with asyncio.timeout(wait_s):
                while any(station.figures is None for station in self.stations):
                    await self._changed.wait()
        except TimeoutError:
            silent = [s.name for s in self.stations if s.figures is None]
            _log.warning("workers have not answered yet", workers=silent)
        return tuple(s.figures for s in self.stations if s.figures is not None)

    def _free(self, model: str, device: str) -> Station | None:
        def preference(station: Station) -> int:
            figures = station.figures
            assert figures is not None
            if figures.model_name == model and figures.state is ModelState.READY:
                return 0
            return 1 if not figures.model_name else 2

        free = [
            station
            for station in self.machines.stations_of(device)
            if station.process is None and station.figures is not None
        ]
        return min(free, key=preference, default=None)
