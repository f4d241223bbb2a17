"""Where workers come from: started here, left by a controller before this one, or attached to.

Attached workers are taken to share one machine's memory, which is not necessarily this one's: what
they say of it is what the scheduler counts with.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from mlxd_controller.launcher.attached import AttachedLauncher, Station
from mlxd_controller.launcher.run_dir import open_run_dir
from mlxd_controller.launcher.subprocess import SubprocessLauncher
from mlxd_controller.launcher.survivors import survivors_of
from mlxd_controller.memory.device import HostProbe, make_device, make_probe, oom_kills, usable_gpus
from mlxd_controller.memory.nvidia import Gpu
from mlxd_controller.runtime.ports import Clock, ModelRef, ModelStore, Ports, Survivor
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_controller.settings import Limits, ServeSettings
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.devices import DeviceKind, kind_of
from mlxd_shared.domain.errors import BackendProblem
from mlxd_shared.domain.figures import WorkerState
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.backends import check_own_worker
from mlxd_shared.ops.logs import get_logger

FIRST_WORD_S = 2.0
"""What a controller that starts gives attached workers to say what they hold."""

_log = get_logger("controller")


@dataclass(frozen=True, slots=True)
class Crew:
    """The ports to workers, and how many models they hold at most (None: what fits)."""

    ports: Ports
    max_loaded: int | None
    attached: AttachedLauncher | None = None
    survivors: tuple[Survivor, ...] = ()
    """Workers of a former controller that follow this one, for the runtime to adopt."""


@asynccontextmanager
async def crew_of(settings: ServeSettings, clock: Clock, store: ModelStore) -> AsyncIterator[Crew]:
    """Have workers around the body, in which no more of them are used at its end.

    Raises:
        InvalidRequest: an address or a folder in the settings is wrong, or another controller has
            the run directory.
        BadCredentials: a file of `settings.worker_security` cannot be used.
        ExceptionGroup: a bug.
    """
    if settings.workers:
        async with _attach(settings, clock) as crew:
            yield crew
        return
    try:
        await asyncio.to_thread(check_own_worker)
    except BackendProblem as problem:  # what models there are and what they need can still be asked
        _log.error("no worker can run here", reason=problem.describe())
    gpus = await asyncio.to_thread(usable_gpus, os.environ)
    run_dir = open_run_dir(settings.run_dir, address=settings.address, environment=os.environ)
    launcher = SubprocessLauncher(
        run_dir=run_dir,
        stall_timeout_s=settings.load_stall_timeout_s,
        orphan_grace_s=settings.orphan_grace_s,
        waiting_max=settings.waiting_max,
        gpu_ids={gpu.name: gpu.id for gpu in gpus},
    )
    try:
        async with survivors_of(
            run_dir, store, GrpcLink, arguments=launcher.arguments
        ) as survivors:
            probe = make_probe(settings.limits, gpus=with_survivors(gpus, survivors))
            ports = Ports(launcher, GrpcLink, probe, clock, oom_kills=oom_kills)
            yield Crew(ports, settings.max_loaded, survivors=survivors)
    finally:
        launcher.close()


def with_survivors(gpus: tuple[Gpu, ...], survivors: Sequence[Survivor]) -> tuple[Gpu, ...]:
    """Return the GPUs as they were before any worker ran, those included that still run."""
    held: Counter[str] = Counter()
    for survivor in survivors:
        held[survivor.figures.device] += survivor.figures.memory.mlx_nbytes
    return tuple(replace(gpu, free_bytes=gpu.free_bytes + held[gpu.name]) for gpu in gpus)


@asynccontextmanager
async def _attach(settings: ServeSettings, clock: Clock) -> AsyncIterator[Crew]:
    launcher = AttachedLauncher(
        settings.workers,
        security=settings.worker_security,
        wait_s=settings.load_stall_timeout_s,
    )
    slots = len(settings.workers)
    probe = AttachedProbe(settings.limits, launcher.stations)
    ports = Ports(launcher, launcher.connect, probe, clock, local_workers=False)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(launcher.run())
        try:
            yield Crew(ports, min(settings.max_loaded or slots, slots), launcher)
        finally:
            watching.cancel()


class AttachedProbe:
    """Implements ports.DeviceProbe from what attached workers said last."""

    def __init__(self, limits: Limits, stations: Sequence[Station]) -> None:
        """Read from `stations`; until one of them has spoken, this machine stands for theirs."""
        self._limits = limits
        self._stations = stations
        self._own = HostProbe(limits, kind=DeviceKind.CPU)

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:
        """Return the one device; what the workers hold counts as usable."""
        reports = [station.last for station in self._stations if station.last is not None]
        if not reports:
            return self._own.read(own_pids)
        kind = kind_of(reports[0].workers[0].backend)
        resident = sum(
            s.figures.memory.resident_nbytes for s in self._stations if s.figures is not None
        )
        return (
            make_device(
                kind.first_name,
                kind,
                total_bytes=min(status.host_total_nbytes for status in reports),
                unheld_bytes=min(s.host_available_nbytes for s in reports) + resident,
                limits=self._limits,
                held_bytes=resident,
            ),
        )


async def list_held(crew: Crew, store: ModelStore) -> list[tuple[ModelRef, LoadSpec]]:
    """Return the models that attached workers hold ready, and how they are loaded.

    A model that is not configured here stays where it is until its worker is needed.
    """
    if crew.attached is None:
        return []
    ready = [
        figures
        for figures in await crew.attached.wait_for_figures(wait_s=FIRST_WORD_S)
        if figures.state is WorkerState.READY
    ]
    if ready:
        await store.list_models()  # reads every folder, so that digests are known
    models = []
    for figures in ready:
        ref = store.find_known(figures.model_digest)
        if ref is None:
            _log.info("a worker holds a model that is not configured", model=figures.model_name)
            continue
        if not figures.form_is_known:
            _log.warning("a worker's model lives in an unknown form", model=figures.model_name)
            continue
        spec = LoadSpec(
            context_length=figures.context_length,
            rows_max=figures.rows_max,
            weights=figures.weights,
            kv_format=figures.kv_format,
            prefix_cache_nbytes=figures.prefix_cache_nbytes,
        )
        models.append((ref, spec))
    return models
