"""StatusService of a worker: everything that the worker knows about itself.

Nothing here waits for a forward pass: figures are the engine's last (`EngineThread.figures`), and
the rest comes from the system's tables.
"""

# ruff: noqa: ARG002, N802 - gRPC's names and signatures

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil

from mlxd.v1 import status_pb2
from mlxd_shared import config
from mlxd_shared.domain.devices import JOINT, DeviceKind
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.figures import (
    MathLibrary,
    WorkerFigures,
    WorkerMemory,
)
from mlxd_shared.ops.machine import memory_of as memory_of_machine
from mlxd_shared.wire.convert import checked_duration_s
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.records import timestamp_to_pb, write
from mlxd_worker.front.worker import Worker
from mlxd_worker.servicers.metrics import WorkerMetrics
from mlxd_worker.thread.facts import Figures


class StatusServicer:
    """Reports what this worker does and holds."""

    def __init__(self, worker: Worker, metrics: WorkerMetrics) -> None:
        self._worker = worker
        self._metrics = metrics

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: Context
    ) -> status_pb2.GetStatusResponse:
        """Return the status of this moment."""
        return status_pb2.GetStatusResponse(status=await self._status(request.model))

    async def WatchStatus(
        self, request: status_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[status_pb2.WatchStatusResponse]:
        """Send the status at once and then at every interval, until the process stops."""
        interval_s = watch_interval_s(request)
        while True:
            yield status_pb2.WatchStatusResponse(status=await self._status(request.model))
            try:
                await asyncio.wait_for(self._worker.stopping.wait(), interval_s)
            except TimeoutError:
                continue
            return

    async def _status(self, model: str) -> status_pb2.Status:
        figures = await self._worker.engine.figures()
        return status_to_pb(self._worker, figures, self._metrics, model=model)


def watch_interval_s(request: status_pb2.WatchStatusRequest) -> float:
    """Return the seconds between two messages; raises InvalidRequest if they are out of bounds."""
    if not request.HasField("interval"):
        return config.WATCH_INTERVAL_DEFAULT_S
    interval_s = checked_duration_s(request.interval, "interval")
    if not config.WATCH_INTERVAL_MIN_S <= interval_s <= config.LOAD_TOTAL_TIMEOUT_S:
        limit = f"{config.WATCH_INTERVAL_MIN_S} s to {config.LOAD_TOTAL_TIMEOUT_S} s"
        raise InvalidRequest.of("interval", limit)
    return interval_s


def status_to_pb(
    worker: Worker, figures: Figures, metrics: WorkerMetrics, *, model: str
) -> status_pb2.Status:
    """Return the process's status; its one worker only if `model` is empty or its own."""
    resident_nbytes = psutil.Process().memory_info().rss
    host = memory_of_machine(worker.identity.machine, resident_nbytes=resident_nbytes)
    host_memory = write(host, status_pb2.HostMemory)
    job = worker.job
    mine = {"", job.name, job.digest} if job else {""}
    return status_pb2.Status(
        role=status_pb2.PROCESS_ROLE_WORKER,
        version=_version(),
        pid=os.getpid(),
        start_time=timestamp_to_pb(worker.identity.started_s),
        now=timestamp_to_pb(time.time()),
        host_memory=host_memory,
        machines=[host_memory],
        workers=[write(figures_of(worker, figures), status_pb2.WorkerStatus)]
        if model in mine
        else [],
        metrics=metrics.families(figures, worker.model_name),
    )


@functools.cache
def _version() -> str:
    # Needed for every status, but read from files each time.
    return importlib.metadata.version("mlxd")


def figures_of(worker: Worker, figures: Figures) -> WorkerFigures:
    """Return the worker's figures of itself."""
    process = psutil.Process()
    times = process.cpu_times()
    identity, job = worker.identity, worker.job
    blas = identity.backend.blas
    own = WorkerFigures(
        pid=process.pid,
        address=identity.address,
        incarnation=identity.incarnation,
        started_unix_s=identity.started_s,
        state=worker.phase,
        progress=worker.progress,
        last_error=worker.last_error,
        backend=identity.backend.distribution,
        mlx_version=identity.backend.version,
        math_library=MathLibrary(blas.name, blas.version, blas.threads, blas.reason),
        compiles=identity.backend.compile_allowed,
        fast_paths_off=tuple(f"{path.value}: {why}" for path, why in identity.off.items()),
        memory=memory_of(
            figures,
            devices=device_names(worker, len(figures.ranks) or 1),
            rss=process.memory_info().rss,
        ),
        age_s=max(time.monotonic() - figures.at_s, 0.0),
        streams_running=figures.load.running,
        streams_waiting=figures.load.waiting,
        oldest_wait_s=figures.load.oldest_wait_s,
        kv_tokens_used=figures.load.kv_tokens_used,
        kv_tokens_capacity=figures.load.kv_tokens_capacity,
        cpu_s=times.user + times.system,
        prefix_disk=figures.prefix_disk,
        prefix_reload_s=figures.prefix_reload_s,
    )
    if job is not None:
        own = replace(own, model_name=job.name, model_path=str(job.path), model_digest=job.digest)
    if (loaded := worker.loaded) is None:
        return own
    return replace(
        own,
        context_length=loaded.context_length,
        context_length_max=loaded.context_length_max,
        vocab_size=loaded.vocab_size,
        rows_max=loaded.rows_max,
        weights=loaded.weights,
        kv_format=loaded.kv_format,
        prefix_cache_nbytes=loaded.prefix_cache_nbytes,
        sampling=loaded.sampling,
    )


def device_name(worker: Worker) -> str:
    """Return the controller's name for the model's device, or its kind's if there is none."""
    return worker.identity.device or worker.identity.backend.kind.first_name


def device_names(worker: Worker, ranks: int) -> tuple[str, ...]:
    """Return the name of each rank's device; without the controller's, by the kind and the rank."""
    if ranks == 1:
        return (device_name(worker),)
    names = tuple(worker.identity.device.split(JOINT))
    if len(names) == ranks:
        return names
    kind = worker.identity.backend.kind
    return tuple(kind.first_name if kind is DeviceKind.CPU else f"gpu{at}" for at in range(ranks))


def memory_of(figures: Figures, *, devices: tuple[str, ...], rss: int) -> WorkerMemory:
    """Return the account of memory; `rss` is the process's resident set in bytes.

    devices: of each rank, which all hold equally much.
    """
    named = zip(devices, figures.ranks, strict=False)
    total_nbytes = sum(account.nbytes for account in figures.accounts)
    return WorkerMemory(
        accounts=figures.accounts,
        total_nbytes=total_nbytes,
        mlx_active_nbytes=figures.mlx_active_nbytes,
        mlx_cache_nbytes=figures.mlx_cache_nbytes,
        mlx_peak_nbytes=figures.mlx_peak_nbytes,
        unaccounted_nbytes=figures.unaccounted_nbytes,
        devices={name: total_nbytes * devices.count(name) for name in devices},
        resident_nbytes=rss,
        ranks=tuple(replace(rank, device=name) for name, rank in named),
    )
