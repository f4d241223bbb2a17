"""Where workers come from: started here or on a fleet, left by an earlier controller, or attached.

Attached workers may run on other machines: the scheduler uses the memory figures that they report
for each machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from mlxd_controller.launcher.attached import AttachedLauncher
from mlxd_controller.launcher.attached_machines import AttachedMachine, AttachedMachines
from mlxd_controller.launcher.run_dir import open_run_dir
from mlxd_controller.launcher.subprocess import SubprocessLauncher
from mlxd_controller.launcher.survivors import survivors_of
from mlxd_controller.memory.device import HostProbe, make_device, make_probe, oom_kills, usable_gpus
from mlxd_controller.memory.nvidia import Gpu
from mlxd_controller.prefixes.keeper import Keeper, open_keeper
from mlxd_controller.runtime.ports import Clock, Holding, ModelStore, Ports, Survivor
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_controller.settings import FleetPlace, Limits, ServeSettings
from mlxd_models.fit.groups import split_group
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem
from mlxd_shared.domain.figures import HostMemory, ModelState, WorkerFigures
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.backends import check_own_worker
from mlxd_shared.ops.logs import get_logger

FIRST_WORD_S = 2.0
"""How long a starting controller waits for attached workers to report what they hold."""

_log = get_logger("controller")


@dataclass(frozen=True, slots=True)
class Crew:
    """The ports to workers, and how many models they hold at most (None: what fits)."""

    ports: Ports
    max_loaded: int | None
    attached: AttachedLauncher | None = None
    keeper: Keeper | None = None
    """Of what workers that are started here keep of prompts on disk; None: nothing is kept."""
    survivors: tuple[Survivor, ...] = ()
    """Workers of an earlier controller that follow this one, for the runtime to adopt."""
    store: ModelStore | None = None
    """The models, where the workers' machines have some of their own; None: those that were given.
    """

    def leave(self) -> None:
        """From now on, leave models loaded in workers that others started."""
        if self.attached is not None:
            self.attached.leave()


@asynccontextmanager
async def crew_of(settings: ServeSettings, clock: Clock, store: ModelStore) -> AsyncIterator[Crew]:
    """Provide workers around the body; at its end none of them is in use any more.

    Raises:
        InvalidRequest: an address or a folder in the settings is wrong, another controller has the
            run directory or the folder for prompts, what would encrypt them is missing, or a fleet
            has no node.
        BadCredentials: a file of `settings.worker_security` cannot be used, or the key for prompts.
        ExceptionGroup: a bug.
    """
    if settings.workers:
        async with _attach(settings, clock) as crew:
            yield crew
        return
    if settings.fleet is not None:
        async with _gather(settings, settings.fleet, clock, store) as crew:
            yield crew
        return
    try:
        await asyncio.to_thread(check_own_worker)
    except BackendProblem as problem:  # models can still be listed and fitted
        _log.error("no worker can run here", reason=problem.describe())
    budget = settings.prefix_disk
    with contextlib.ExitStack() as stack:
        keeper = None
        if budget is not None:
            keeper = stack.enter_context(contextlib.closing(open_keeper(budget)))
        async with _start(settings, clock, store, keeper) as crew:
            yield crew


@asynccontextmanager
async def _start(
    settings: ServeSettings, clock: Clock, store: ModelStore, keeper: Keeper | None
) -> AsyncIterator[Crew]:
    """Have workers that are processes of this controller's, around the body."""
    gpus = await asyncio.to_thread(usable_gpus, os.environ)
    run_dir = open_run_dir(settings.run_dir, address=settings.address, environment=os.environ)
    launcher = SubprocessLauncher(
        run_dir=run_dir,
        stall_timeout_s=settings.load_stall_timeout_s,
        orphan_grace_s=settings.orphan_grace_s,
        waiting_max=settings.waiting_max,
        gpu_ids={gpu.name: gpu.id for gpu in gpus},
        findings=settings.stores.findings,
        prefix_disk=None if keeper is None else keeper.budget.folder,
        prefix_disk_key=None if keeper is None else keeper.budget.key_file,
    )
    try:
        async with survivors_of(
            run_dir, store, GrpcLink, arguments=launcher.arguments
        ) as survivors:
            probe = make_probe(settings.limits, gpus=with_survivors(gpus, survivors))
            ports = Ports(launcher, GrpcLink, probe, clock, oom_kills=lambda _: oom_kills())
            yield Crew(ports, settings.max_loaded, keeper=keeper, survivors=survivors)
    finally:
        launcher.close()


@asynccontextmanager
async def _gather(
    settings: ServeSettings, place: FleetPlace, clock: Clock, store: ModelStore
) -> AsyncIterator[Crew]:
    """Have workers on the nodes of a cluster, around the body; what reaches it is an extra."""
    from mlxd_controller.fleet.gathering import gather_fleet  # noqa: PLC0415
    from mlxd_controller.fleet.ray_nodes import join_cluster  # noqa: PLC0415

    async with (
        join_cluster(place.address) as membership,
        gather_fleet(settings, membership, clock, store) as fleet,
    ):
        yield Crew(fleet.ports, settings.max_loaded, survivors=fleet.survivors, store=fleet.store)


def with_survivors(gpus: tuple[Gpu, ...], survivors: Sequence[Survivor]) -> tuple[Gpu, ...]:
    """Return the GPUs as they were before any worker ran, including those that survived."""
    held: Counter[str] = Counter()
    for survivor in survivors:
        for device in split_group(survivor.device):  # ranks have equally much
            held[device] += survivor.figures.memory.mlx_nbytes
    return tuple(replace(gpu, free_bytes=gpu.free_bytes + held[gpu.name]) for gpu in gpus)


@asynccontextmanager
async def _attach(settings: ServeSettings, clock: Clock) -> AsyncIterator[Crew]:
    launcher = AttachedLauncher(
        settings.workers,
        security=settings.worker_security,
        wait_s=settings.load_stall_timeout_s,
    )
    probe = AttachedProbe(settings.limits, launcher.machines)
    ports = Ports(
        launcher, launcher.connect, probe, clock, local_workers=False, endable_workers=False
    )
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(launcher.run())
        try:
            yield Crew(ports, settings.max_loaded, launcher)
        finally:
            watching.cancel()


class AttachedProbe:
    """Implements ports.DeviceProbe from the last reports of attached workers."""

    def __init__(self, limits: Limits, machines: AttachedMachines) -> None:
        """Until a machine is known, this one stands in for it, with room for one model."""
        self._limits = limits
        self._machines = machines
        self._own = HostProbe(limits, kind=DeviceKind.CPU)
        self._stand_in: tuple[Device, ...] = ()

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:
        """Return a device for each machine.

        What the workers hold counts as usable, even unused models: a launch unloads those. A device
        has room for one model per present worker. If this machine stood in for one that turns out
        to have another name, its own device is reported as lost, so that waiting loads learn it.
        """
        machines = self._machines.look()
        if not machines:
            own = self._own.read(own_pids)
            self._stand_in = tuple(replace(device, models_max=1) for device in own)
            return self._stand_in
        devices = {machine.device: self._device_of(machine) for machine in machines}
        gone = [device for device in self._stand_in if device.name not in devices]
        self._stand_in = ()
        return (*devices.values(), *(replace(device, lost=True) for device in gone))

    def machines(self) -> tuple[HostMemory, ...]:
        """Return the machines' memory; see the port."""
        return tuple(machine.memory for machine in self._machines.look())

    def _device_of(self, machine: AttachedMachine) -> Device:
        memory = machine.memory
        device = make_device(
            machine.device,
            machine.kind,
            total_bytes=memory.total_nbytes,
            unheld_bytes=memory.available_nbytes + memory.resident_nbytes,
            limits=self._limits,
            held_bytes=memory.resident_nbytes,
        )
        return replace(
            device,
            node=machine.node,
            lost=memory.lost,
            models_max=machine.places,
            workers=tuple(station.name for station in machine.stations),
        )


async def take_held(crew: Crew, store: ModelStore) -> tuple[Survivor, ...]:
    """Take the attached workers that hold a ready model, one per model, for the runtime to adopt.

    A model that is not configured here stays loaded until the next load on its machine.
    """
    launcher = crew.attached
    if launcher is None:
        return ()
    said = await launcher.wait_for_figures(wait_s=FIRST_WORD_S)
    if any(figures.state is ModelState.READY for figures in said):
        await store.list_models()  # reads every folder, so that digests are known
    held: dict[str, Survivor] = {}
    for device, station in launcher.machines.list_stations():
        figures = station.figures
        if figures is None or figures.state is not ModelState.READY:
            continue
        ref = store.find_known(figures.model_digest)
        if ref is None:
            _log.info("a worker holds a model that is not configured", model=figures.model_name)
        elif not figures.form_is_known:
            _log.warning("a worker's model is in an unknown form", model=figures.model_name)
        elif ref.digest not in held:
            process = station.take()
            link = launcher.connect(
                address=process.address, incarnation=process.incarnation, digest=ref.digest
            )
            holding = Holding(ref.digest, ref.name, str(ref.path), spec_of(figures), load_s=0.0)
            held[ref.digest] = Survivor(process, link, figures, holding, ref, device)
    return tuple(held.values())


def spec_of(figures: WorkerFigures) -> LoadSpec:
    """Return load options that match the model of a ready worker as it is."""
    return LoadSpec(
        context_length=figures.context_length,
        rows_max=figures.rows_max,
        weights=figures.weights,
        kv_format=figures.kv_format,
        prefix_cache_nbytes=figures.prefix_cache_nbytes,
    )
