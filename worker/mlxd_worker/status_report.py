"""A worker's status for the wire: everything about it that it can know itself.

Invariants:
- Nothing in here waits: figures come from the caller, the rest from the system's tables.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import time

import psutil

from mlxd.v1 import status_pb2, types_pb2
from mlxd_shared.convert import (
    KV_FORMAT_TO_PB,
    WEIGHTS_TO_PB,
    duration_to_pb,
    sampling_to_pb,
    timestamp_to_pb,
)
from mlxd_worker.facts import Figures, Progress
from mlxd_worker.metrics import WorkerMetrics
from mlxd_worker.worker import Phase, Worker

PHASE_TO_PB = {
    Phase.EMPTY: types_pb2.MODEL_STATE_UNLOADED,
    Phase.LOADING: types_pb2.MODEL_STATE_LOADING,
    Phase.READY: types_pb2.MODEL_STATE_READY,
    Phase.DRAINING: types_pb2.MODEL_STATE_DRAINING,
    Phase.UNLOADING: types_pb2.MODEL_STATE_UNLOADING,
    Phase.FAILED: types_pb2.MODEL_STATE_FAILED,
}


def status_to_pb(
    worker: Worker, figures: Figures, metrics: WorkerMetrics, *, model: str
) -> status_pb2.Status:
    """Return the process's status; its one worker only if `model` is empty or its own."""
    memory = psutil.virtual_memory()
    job = worker.job
    mine = {"", job.name, job.digest} if job else {""}
    return status_pb2.Status(
        role=status_pb2.PROCESS_ROLE_WORKER,
        version=_version(),
        pid=os.getpid(),
        start_time=timestamp_to_pb(worker.identity.started_s),
        now=timestamp_to_pb(time.time()),
        host_memory=status_pb2.HostMemory(
            total_bytes=memory.total,
            available_bytes=memory.available,
            resident_bytes=psutil.Process().memory_info().rss,
        ),
        workers=[worker_to_pb(worker, figures)] if model in mine else [],
        metrics=metrics.families(figures, worker.model_name),
    )


@functools.cache
def _version() -> str:
    # Asked for with every status, and read from files each time.
    return importlib.metadata.version("mlxd")


def worker_to_pb(worker: Worker, figures: Figures) -> status_pb2.WorkerStatus:
    """Return what this worker says about itself."""
    process = psutil.Process()
    times = process.cpu_times()
    identity, job, loaded = worker.identity, worker.job, worker.loaded
    pb = status_pb2.WorkerStatus(
        pid=process.pid,
        address=identity.address,
        incarnation=identity.incarnation,
        state=PHASE_TO_PB[worker.phase],
        progress=progress_to_pb(worker.progress),
        memory=memory_to_pb(figures, device=device_name(worker), rss=process.memory_info().rss),
        figures_age=duration_to_pb(max(time.monotonic() - figures.at_s, 0.0)),
        last_error=worker.last_error,
        streams_running=figures.running,
        streams_waiting=figures.waiting,
        oldest_wait=duration_to_pb(figures.oldest_wait_s),
        kv_tokens_used=figures.kv_tokens_used,
        kv_tokens_capacity=figures.kv_tokens_capacity,
        backend=identity.backend.distribution,
        mlx_version=identity.backend.version,
        math_library=math_library_to_pb(worker),
        compiles=identity.backend.compile_allowed,
        cpu_seconds=times.user + times.system,
        start_time=timestamp_to_pb(identity.started_s),
    )
    if job is not None:
        pb.model_name, pb.model_path, pb.model_digest = job.name, str(job.path), job.digest
    if loaded is not None:
        pb.context_length = loaded.context_length
        pb.context_length_max = loaded.context_length_max
        pb.vocab_size = loaded.vocab_size
        pb.rows_max = loaded.rows_max
        pb.weights = WEIGHTS_TO_PB[loaded.weights]
        pb.kv_format = KV_FORMAT_TO_PB[loaded.kv_format]
        pb.prefix_cache_bytes = loaded.prefix_cache_nbytes
        pb.effective_sampling.CopyFrom(sampling_to_pb(loaded.sampling))
    return pb


def progress_to_pb(progress: Progress) -> types_pb2.LoadProgress:
    """Return a load's progress for the wire."""
    return types_pb2.LoadProgress(
        bytes_read=progress.bytes_read, bytes_total=progress.bytes_total, stage=progress.stage
    )


def device_name(worker: Worker) -> str:
    """Return the device that the model lives on, as the controller calls it where there is one."""
    kind = worker.identity.backend.kind.value
    return worker.identity.device or (kind if kind == "cpu" else "gpu0")


def memory_to_pb(figures: Figures, *, device: str, rss: int) -> status_pb2.WorkerMemory:
    """Return the account of memory; `rss` is the process's resident set in bytes."""
    total_nbytes = sum(account.nbytes for account in figures.accounts)
    return status_pb2.WorkerMemory(
        accounts=[
            status_pb2.MemoryAccount(name=a.name, bytes=a.nbytes, arrays=a.arrays)
            for a in figures.accounts
        ],
        total_bytes=total_nbytes,
        mlx_active_bytes=figures.mlx_active_nbytes,
        mlx_cache_bytes=figures.mlx_cache_nbytes,
        mlx_peak_bytes=figures.mlx_peak_nbytes,
        unaccounted_bytes=figures.unaccounted_nbytes,
        devices=[status_pb2.DeviceMemory(device=device, bytes=total_nbytes)],
        resident_bytes=rss,
    )


def math_library_to_pb(worker: Worker) -> status_pb2.MathLibrary:
    """Return which library multiplies matrices."""
    blas = worker.identity.backend.blas
    return status_pb2.MathLibrary(
        name=blas.name, version=blas.version, threads=blas.threads, reason=blas.reason
    )
