"""A status from the wire to `messages`."""

from __future__ import annotations

from mlxd import messages as m
from mlxd._wire import (
    kv_format_from_pb,
    moment_from_pb,
    progress_from_pb,
    state_from_pb,
    weights_from_pb,
)
from mlxd.v1 import status_pb2
from mlxd_shared.domain.figures import MathLibrary, MemoryAccount
from mlxd_shared.wire.convert import duration_from_pb, sampling_from_pb

_ROLES = {
    status_pb2.PROCESS_ROLE_CONTROLLER: m.ProcessRole.CONTROLLER,
    status_pb2.PROCESS_ROLE_WORKER: m.ProcessRole.WORKER,
}
_METRIC_KINDS = {
    status_pb2.METRIC_KIND_COUNTER: m.MetricKind.COUNTER,
    status_pb2.METRIC_KIND_GAUGE: m.MetricKind.GAUGE,
    status_pb2.METRIC_KIND_HISTOGRAM: m.MetricKind.HISTOGRAM,
}


def status_from_pb(pb: status_pb2.Status) -> m.Status:
    """Return the whole status."""
    host = pb.host_memory
    return m.Status(
        role=_ROLES.get(pb.role, m.ProcessRole.UNKNOWN),
        version=pb.version,
        pid=pb.pid,
        start_time=moment_from_pb(pb.start_time),
        now=moment_from_pb(pb.now),
        host_memory=m.HostMemory(host.total_bytes, host.available_bytes, host.resident_bytes),
        devices=tuple(_device(device) for device in pb.devices),
        workers=tuple(_worker(worker) for worker in pb.workers),
        metrics=tuple(_metric(family) for family in pb.metrics),
    )


def _device(pb: status_pb2.DeviceStatus) -> m.DeviceStatus:
    return m.DeviceStatus(
        name=pb.name,
        kind=pb.kind,
        total_nbytes=pb.total_bytes,
        budget_nbytes=pb.budget_bytes,
        reserved_nbytes=pb.reserved_bytes,
        usable_nbytes=pb.usable_bytes,
        held_nbytes=pb.held_bytes,
        pressed=pb.pressed,
        id=pb.id,
        product=pb.product,
    )


def _worker(pb: status_pb2.WorkerStatus) -> m.WorkerStatus:
    library = pb.math_library
    return m.WorkerStatus(
        pid=pb.pid,
        address=pb.address,
        incarnation=pb.incarnation,
        model_name=pb.model_name,
        model_path=pb.model_path,
        model_digest=pb.model_digest,
        state=state_from_pb(pb.state),
        progress=progress_from_pb(pb.progress),
        context_length=pb.context_length,
        context_length_max=pb.context_length_max,
        vocab_size=pb.vocab_size,
        rows_max=pb.rows_max,
        memory=_memory(pb.memory),
        figures_age_s=duration_from_pb(pb.figures_age),
        exit_code=pb.exit_code if pb.HasField("exit_code") else None,
        last_error=pb.last_error,
        last_lines=tuple(pb.last_lines),
        streams_running=pb.streams_running,
        streams_waiting=pb.streams_waiting,
        oldest_wait_s=duration_from_pb(pb.oldest_wait),
        kv_tokens_used=pb.kv_tokens_used,
        kv_tokens_capacity=pb.kv_tokens_capacity,
        backend=pb.backend,
        mlx_version=pb.mlx_version,
        math_library=MathLibrary(library.name, library.version, library.threads, library.reason),
        compiles=pb.compiles,
        weights=weights_from_pb(pb.weights),
        cpu_s=pb.cpu_seconds,
        start_time=moment_from_pb(pb.start_time),
        effective_sampling=sampling_from_pb(pb.effective_sampling),
        kv_format=kv_format_from_pb(pb.kv_format),
        prefix_cache_nbytes=pb.prefix_cache_bytes,
    )


def _memory(pb: status_pb2.WorkerMemory) -> m.WorkerMemory:
    return m.WorkerMemory(
        accounts=tuple(MemoryAccount(a.name, a.bytes, a.arrays) for a in pb.accounts),
        total_nbytes=pb.total_bytes,
        mlx_active_nbytes=pb.mlx_active_bytes,
        mlx_cache_nbytes=pb.mlx_cache_bytes,
        mlx_peak_nbytes=pb.mlx_peak_bytes,
        unaccounted_nbytes=pb.unaccounted_bytes,
        devices={held.device: held.bytes for held in pb.devices},
        resident_nbytes=pb.resident_bytes,
    )


def _metric(pb: status_pb2.MetricFamily) -> m.MetricFamily:
    kind = _METRIC_KINDS.get(pb.kind, m.MetricKind.UNKNOWN)
    return m.MetricFamily(pb.name, pb.help, kind, tuple(_point(point) for point in pb.points))


def _point(pb: status_pb2.MetricPoint) -> m.MetricPoint:
    histogram = None
    if pb.HasField("histogram"):
        bounds, counts = tuple(pb.histogram.bounds), tuple(pb.histogram.counts)
        histogram = m.Histogram(bounds, counts, pb.histogram.sum)
    return m.MetricPoint(dict(pb.labels), pb.value, histogram)
