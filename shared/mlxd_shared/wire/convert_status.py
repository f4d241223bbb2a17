"""What a status carries, to the wire and back: workers' figures, and the families of metrics."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mlxd.v1 import status_pb2, types_pb2
from mlxd_shared.domain.figures import (
    DeviceMemory,
    LoadProgress,
    MathLibrary,
    MemoryAccount,
    MemoryFigures,
    ProcessStatus,
    WorkerFigures,
    WorkerState,
)
from mlxd_shared.domain.requests import Weights
from mlxd_shared.ops.metrics import Counter, Gauges, Histogram
from mlxd_shared.wire.convert import (
    KV_FORMAT_FROM_PB,
    KV_FORMAT_TO_PB,
    WEIGHTS_FROM_PB,
    WEIGHTS_TO_PB,
    duration_from_pb,
    duration_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from mlxd_shared.wire.convert_bounds import timestamp_to_pb

WORKER_STATE_TO_PB = {
    state: types_pb2.MODEL_STATE_UNSPECIFIED
    if state is WorkerState.UNKNOWN
    else types_pb2.ModelState.Value(f"MODEL_STATE_{state.name}")
    for state in WorkerState
}
WORKER_STATE_FROM_PB = {number: state for state, number in WORKER_STATE_TO_PB.items()}
_OF_FIGURES = {field.name for field in fields(WorkerFigures)}
_SAME = tuple(
    field.name
    for field in status_pb2.WorkerStatus.DESCRIPTOR.fields
    if field.name in _OF_FIGURES
    and field.message_type is None
    and field.enum_type is None
    and not (field.is_repeated or field.has_presence)
)
"""What is a number or a text of one name on both sides; all else is converted one by one."""


def process_from_pb(pb: status_pb2.Status) -> ProcessStatus:
    """Return what a process says of itself and its workers; its counters are left out."""
    return ProcessStatus(
        version=pb.version,
        host_total_nbytes=pb.host_memory.total_bytes,
        host_available_nbytes=pb.host_memory.available_bytes,
        workers=tuple(figures_from_pb(worker) for worker in pb.workers),
    )


def figures_from_pb(pb: status_pb2.WorkerStatus) -> WorkerFigures:
    """Return all that is said of a worker."""
    library = pb.math_library
    same: dict[str, Any] = {name: getattr(pb, name) for name in _SAME}
    return WorkerFigures(
        **same,
        started_unix_s=pb.start_time.ToMicroseconds() / 1e6,
        state=WORKER_STATE_FROM_PB.get(pb.state, WorkerState.UNKNOWN),
        progress=progress_from_pb(pb.progress) if pb.HasField("progress") else None,
        math_library=(
            MathLibrary(library.name, library.version, library.threads, library.reason)
            if pb.HasField("math_library")
            else None
        ),
        weights=WEIGHTS_FROM_PB.get(pb.weights, Weights.AUTO),
        kv_format=KV_FORMAT_FROM_PB.get(pb.kv_format),
        form_is_known=pb.weights in WEIGHTS_FROM_PB and pb.kv_format in KV_FORMAT_FROM_PB,
        prefix_cache_nbytes=pb.prefix_cache_bytes,
        sampling=(
            sampling_from_pb(pb.effective_sampling) if pb.HasField("effective_sampling") else None
        ),
        memory=_memory_from_pb(pb.memory),
        age_s=duration_from_pb(pb.figures_age) if pb.HasField("figures_age") else None,
        oldest_wait_s=duration_from_pb(pb.oldest_wait) if pb.HasField("oldest_wait") else None,
        cpu_s=pb.cpu_seconds,
        exit_code=pb.exit_code if pb.HasField("exit_code") else None,
        last_lines=tuple(pb.last_lines),
    )


def figures_to_pb(figures: WorkerFigures) -> status_pb2.WorkerStatus:
    """Return `figures` for the wire; what is None, or nothing, stays absent."""
    age_s, wait_s, sampling = figures.age_s, figures.oldest_wait_s, figures.sampling
    memory, started_s = figures.memory, figures.started_unix_s
    same: dict[str, Any] = {name: getattr(figures, name) for name in _SAME}
    return status_pb2.WorkerStatus(
        **same,
        start_time=timestamp_to_pb(started_s) if started_s else None,
        state=WORKER_STATE_TO_PB[figures.state],
        progress=None if figures.progress is None else progress_to_pb(figures.progress),
        math_library=_library_to_pb(figures.math_library),
        weights=WEIGHTS_TO_PB[figures.weights],
        kv_format=KV_FORMAT_TO_PB[figures.kv_format],
        prefix_cache_bytes=figures.prefix_cache_nbytes,
        effective_sampling=None if sampling is None else sampling_to_pb(sampling),
        memory=None if memory == MemoryFigures() else _memory_to_pb(memory),
        figures_age=None if age_s is None else duration_to_pb(age_s),
        oldest_wait=None if wait_s is None else duration_to_pb(wait_s),
        cpu_seconds=figures.cpu_s,
        exit_code=figures.exit_code,
        last_lines=figures.last_lines,
    )


def progress_to_pb(progress: LoadProgress) -> types_pb2.LoadProgress:
    """Return how far a load has come, for the wire."""
    return types_pb2.LoadProgress(
        bytes_read=progress.bytes_read, bytes_total=progress.bytes_total, stage=progress.stage
    )


def progress_from_pb(pb: types_pb2.LoadProgress) -> LoadProgress:
    """Return how far a load has come."""
    return LoadProgress(pb.stage, pb.bytes_read, pb.bytes_total)


def _memory_from_pb(pb: status_pb2.WorkerMemory) -> MemoryFigures:
    return MemoryFigures(
        accounts=tuple(MemoryAccount(a.name, a.bytes, a.arrays) for a in pb.accounts),
        total_nbytes=pb.total_bytes,
        mlx_active_nbytes=pb.mlx_active_bytes,
        mlx_cache_nbytes=pb.mlx_cache_bytes,
        mlx_peak_nbytes=pb.mlx_peak_bytes,
        unaccounted_nbytes=pb.unaccounted_bytes,
        devices=tuple(DeviceMemory(held.device, held.bytes) for held in pb.devices),
        resident_nbytes=pb.resident_bytes,
    )


def _memory_to_pb(memory: MemoryFigures) -> status_pb2.WorkerMemory:
    return status_pb2.WorkerMemory(
        accounts=[
            status_pb2.MemoryAccount(name=a.name, bytes=a.nbytes, arrays=a.arrays)
            for a in memory.accounts
        ],
        total_bytes=memory.total_nbytes,
        mlx_active_bytes=memory.mlx_active_nbytes,
        mlx_cache_bytes=memory.mlx_cache_nbytes,
        mlx_peak_bytes=memory.mlx_peak_nbytes,
        unaccounted_bytes=memory.unaccounted_nbytes,
        devices=[
            status_pb2.DeviceMemory(device=held.device, bytes=held.nbytes)
            for held in memory.devices
        ],
        resident_bytes=memory.resident_nbytes,
    )


def _library_to_pb(library: MathLibrary | None) -> status_pb2.MathLibrary | None:
    if library is None:
        return None
    return status_pb2.MathLibrary(
        name=library.name, version=library.version, threads=library.threads, reason=library.reason
    )


def counter_to_pb(counter: Counter) -> status_pb2.MetricFamily:
    """Return the family for the wire."""
    family = gauge_to_pb(counter.name, counter.help, counter.points)
    family.kind = status_pb2.METRIC_KIND_COUNTER
    return family


def histogram_to_pb(histogram: Histogram) -> status_pb2.MetricFamily:
    """Return the family for the wire."""
    return status_pb2.MetricFamily(
        name=histogram.name,
        help=histogram.help,
        kind=status_pb2.METRIC_KIND_HISTOGRAM,
        points=[
            status_pb2.MetricPoint(
                labels=dict(key),
                histogram=status_pb2.Histogram(
                    bounds=histogram.bounds, counts=counts, sum=histogram.sums[key]
                ),
            )
            for key, counts in sorted(histogram.counts.items())
        ],
    )


def gauge_to_pb(name: str, help_text: str, values: Gauges) -> status_pb2.MetricFamily:
    """Return the family of a gauge, read at this moment."""
    return status_pb2.MetricFamily(
        name=name,
        help=help_text,
        kind=status_pb2.METRIC_KIND_GAUGE,
        points=[
            status_pb2.MetricPoint(labels=dict(key), value=value)
            for key, value in sorted(values.items())
        ],
    )
