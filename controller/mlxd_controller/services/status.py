"""StatusService: the controller's view of itself, its workers and its memory.

It never waits longer than STATUS_WAIT_S for a worker, and polls no worker that answered within
STATUS_RECENT_S, however many callers ask; older figures carry their age.
"""
# ruff: noqa: ARG002, N802 - gRPC's names and signatures

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from importlib.metadata import version

from mlxd.v1 import status_pb2
from mlxd_controller.core.state import State
from mlxd_controller.memory.device import resident_bytes
from mlxd_controller.prefixes.keeper import Keeper
from mlxd_controller.runtime.ports import Clock
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.services.allowances import Allowances
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.gauges import families_to_pb, gauges
from mlxd_controller.services.views import worker_to_pb
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.blocks.root import FormFolder
from mlxd_shared.domain.errors import InvalidRequest, QueueFull
from mlxd_shared.ops.machine import memory_of, this_machine
from mlxd_shared.wire.convert import checked_duration_s
from mlxd_shared.wire.convert_status import gauge_to_pb
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.records import timestamp_to_pb, write

DESCRIPTOR = status_pb2.DESCRIPTOR.services_by_name["StatusService"]


class StatusService:
    """Implements the service over the runtime."""

    def __init__(
        self,
        catalog: Catalog,
        runtime: Runtime,
        clock: Clock,
        *,
        allowances: Allowances,
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper = keeper
        self._allowances = allowances
        self._catalog = catalog
        self._runtime = runtime
        self._clock = clock
        self._started_unix_s = clock.unix_s()
        self._version = version("mlxd")
        self._machine = this_machine()
        self._watchers = 0

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: Context
    ) -> status_pb2.GetStatusResponse:
        """Return the status now."""
        digest = await self._digest(request.model)
        return status_pb2.GetStatusResponse(status=await self.read(digest))

    async def WatchStatus(
        self, request: status_pb2.WatchStatusRequest, context: Context
    ) -> AsyncGenerator[status_pb2.WatchStatusResponse, None]:
        """Return the status now and at every interval."""
        interval_s = config.WATCH_INTERVAL_DEFAULT_S
        if request.HasField("interval"):
            interval_s = checked_duration_s(request.interval, "interval")
        if not config.WATCH_INTERVAL_MIN_S <= interval_s < float("inf"):
            limit = f"at least {config.WATCH_INTERVAL_MIN_S} s"
            raise InvalidRequest.of("interval", limit)
        digest = await self._digest(request.model)
        if self._watchers >= config.STATUS_WATCHERS_MAX:
            raise QueueFull("status watchers", config.STATUS_WATCHERS_MAX)
        self._watchers += 1
        try:
            while True:
                yield status_pb2.WatchStatusResponse(status=await self.read(digest))
                await asyncio.sleep(interval_s)
        finally:
            self._watchers -= 1

    async def _digest(self, model: str) -> str:
        return (await self._catalog.find(model)).digest if model else ""

    def _prefix_store(self) -> status_pb2.PrefixStore | None:
        """Return what is on disk of prompts; None where nothing is kept."""
        keeper = self._keeper
        if keeper is None:
            return None
        folders = keeper.accounts(self._runtime.workers.live())
        by_size = sorted(folders, key=lambda folder: -folder.nbytes)
        largest = {folder.form for folder in by_size[: config.PREFIX_FOLDERS_SHOWN]}
        return status_pb2.PrefixStore(
            path=str(keeper.budget.folder),
            budget_bytes=keeper.budget.nbytes,
            bytes=sum(folder.nbytes for folder in folders),
            folders=[_folder_to_pb(folder) for folder in folders if folder.form in largest],
        )

    async def read(self, digest: str = "") -> status_pb2.Status:
        """Return the status now, with all workers or those of one model."""
        workers = self._runtime.workers
        await workers.refresh(
            workers.live(), wait_s=config.STATUS_WAIT_S, recent_s=config.STATUS_RECENT_S
        )
        workers.measure()
        shown = [
            worker for worker in (*workers.live(), *workers.dead()) if digest in ("", worker.digest)
        ]
        state = self._runtime.state
        resident_nbytes = resident_bytes((os.getpid(), *workers.pids()))
        own = memory_of(self._machine, resident_nbytes=resident_nbytes)
        return status_pb2.Status(
            role=status_pb2.PROCESS_ROLE_CONTROLLER,
            version=self._version,
            pid=os.getpid(),
            start_time=timestamp_to_pb(self._started_unix_s),
            now=timestamp_to_pb(self._clock.unix_s()),
            host_memory=write(own, status_pb2.HostMemory),
            machines=[
                write(memory, status_pb2.HostMemory)
                for memory in self._runtime.machines() or (own,)
            ],
            devices=[_device_to_pb(device, state) for device in self._runtime.measure_devices()],
            prefix_store=self._prefix_store(),
            workers=[
                worker_to_pb(worker, state.by_worker(worker.number), self._clock)
                for worker in shown
            ],
            metrics=[
                *families_to_pb(self._runtime.metrics),
                *gauges(state, workers.live()),
                gauge_to_pb(
                    "mlxd_key_streams",
                    "Requests under way, by key.",
                    self._allowances.gauges(),
                ),
            ],
        )


def _folder_to_pb(folder: FormFolder) -> status_pb2.PrefixFolder:
    about = folder.about
    used = timestamp_to_pb(folder.last_s) if folder.last_s else None
    return status_pb2.PrefixFolder(
        form=folder.form,
        model=about.model,
        model_digest=about.digest,
        weights=about.weights,
        context_length=min(about.context_length, (1 << 32) - 1),
        bytes=folder.nbytes,
        blocks=folder.blocks,
        last_use_time=used,
        in_use=folder.is_held,
        encrypted=folder.is_encrypted,
    )


def _device_to_pb(device: Device, state: State) -> status_pb2.DeviceStatus:
    return status_pb2.DeviceStatus(
        name=device.name,
        kind=device.kind,
        total_bytes=device.total_bytes,
        budget_bytes=device.budget_bytes,
        reserved_bytes=state.reserved_on(device),
        usable_bytes=device.usable_bytes,
        held_bytes=state.held_on(device),
        pressed=device.name in state.pressed,
        id=device.id,
        product=device.product,
        machine=device.node,
        lost=device.lost,
        models_max=device.models_max,
    )
