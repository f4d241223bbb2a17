"""A Status as text for Prometheus. Pure: the message goes in, the text comes out.

A series about one worker process carries its incarnation, so that no counter decreases within a
series. Label sets within a family are unique, whatever the message contains; the last one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from mlxd.v1 import status_pb2, types_pb2
from mlxd_shared.wire.records import duration_from_pb

TOTAL = "_total"
_KINDS = {
    status_pb2.METRIC_KIND_COUNTER: "counter",
    status_pb2.METRIC_KIND_GAUGE: "gauge",
    status_pb2.METRIC_KIND_HISTOGRAM: "histogram",
}
Worker = status_pb2.WorkerStatus
Labels = dict[str, str]


def render(status: status_pb2.Status, *, vllm_aliases: bool = False) -> bytes:
    """Return the text of a scrape, in the format of `http.CONTENT_TYPE`."""
    return generate_latest(_Fixed(families(status, vllm_aliases=vllm_aliases)))


class _Fixed(Collector):
    """Families that exist already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._metrics


def families(status: status_pb2.Status, *, vllm_aliases: bool = False) -> Iterator[Metric]:
    """Yield every family and, if asked for, the `vllm:` names that routers look for."""
    for family in status.metrics:
        yield _count_points(family)
    yield from _of_process(status)
    yield from _of_memory(status)
    yield from _of_workers(status.workers)
    if vllm_aliases:
        ready = [w for w in status.workers if w.state == types_pb2.MODEL_STATE_READY]
        for name, text, labels, value in _ALIASES:
            yield _gauge(name, text, ((labels(w), value(w)) for w in ready))


def _count_points(family: status_pb2.MetricFamily) -> Metric:
    kind = _KINDS.get(family.kind, "unknown")
    name = family.name.removesuffix(TOTAL) if kind == "counter" else family.name
    metric = Metric(name, family.help, kind)
    for point in {tuple(sorted(p.labels.items())): p for p in family.points}.values():
        labels = dict(point.labels)
        if kind == "histogram":
            _add_histogram(metric, labels, point.histogram)
        else:
            metric.add_sample(name + TOTAL if kind == "counter" else name, labels, point.value)
    return metric


def _add_histogram(metric: Metric, labels: Labels, histogram: status_pb2.Histogram) -> None:
    """Add cumulative buckets, then count and sum."""
    count = 0
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    for bound, inside in zip(bounds, histogram.counts, strict=True):
        count += inside
        metric.add_sample(metric.name + "_bucket", {**labels, "le": bound}, count)
    metric.add_sample(metric.name + "_count", labels, count)
    metric.add_sample(metric.name + "_sum", labels, histogram.sum)


def _gauge(name: str, text: str, points: Iterable[tuple[Labels, float]]) -> Metric:
    metric = Metric(name, text, "gauge")
    for labels, value in points:
        metric.add_sample(name, labels, value)
    return metric


def _seconds(moment: Timestamp) -> float:
    return moment.seconds + moment.nanos * 1e-9


def _of_process(status: status_pb2.Status) -> Iterator[Metric]:
    role = status_pb2.ProcessRole.Name(status.role).removeprefix("PROCESS_ROLE_").lower()
    info = {"version": status.version, "role": role}
    start = _seconds(status.start_time)
    yield _gauge("mlxd_build_info", "Version and role of the process; always 1.", [(info, 1)])
    yield _gauge("mlxd_start_time_seconds", "When the counters began, since 1970.", [({}, start)])


def _of_memory(status: status_pb2.Status) -> Iterator[Metric]:
    host = status.host_memory
    for name, text, _, value in _OF_MACHINES:
        yield _gauge(f"mlxd_host_memory_{name}_bytes", text, [({}, value(host))])
    machines = [({"machine": m.machine}, m) for m in status.machines]
    yield _gauge("mlxd_machine_up", "Whether workers of the machine can be reached.",
                 ((labels, float(not m.lost)) for labels, m in machines))  # fmt: skip
    for name, _, text, value in _OF_MACHINES:
        points = ((labels, value(machine)) for labels, machine in machines)
        yield _gauge(f"mlxd_machine_memory_{name}_bytes", text, points)
    devices = [({"device": d.name, "kind": d.kind}, d) for d in status.devices]
    for name, text, amount in _OF_DEVICES:
        points = ((labels, amount(device)) for labels, device in devices)
        yield _gauge(f"mlxd_device_memory_{name}_bytes", text, points)


_OF_MACHINES: tuple[tuple[str, str, str, Callable[[status_pb2.HostMemory], float]], ...] = (
    ("total", "Memory of the machine.", "Memory of a machine on which workers run.",
     lambda m: m.total_bytes),
    ("available", "Memory of the machine that is free.", "What of it is free.",
     lambda m: m.available_bytes),
    ("resident", "What mlxd's processes hold.", "What mlxd's processes hold of it.",
     lambda m: m.resident_bytes),
)  # fmt: skip
"""Of each: what is said of our own machine, and of those on which workers run."""
_OF_DEVICES: tuple[tuple[str, str, Callable[[status_pb2.DeviceStatus], float]], ...] = (
    ("total", "Memory of the device.", lambda d: d.total_bytes),
    ("budget", "What models may use of it.", lambda d: d.budget_bytes),
    ("reserved", "What models are promised.", lambda d: d.reserved_bytes),
    ("usable", "What others leave of it now.", lambda d: d.usable_bytes),
    ("held", "What workers hold of it.", lambda d: d.held_bytes),
)
_OF_WORKERS: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("start_time_seconds", "When the process began, since 1970.",
     lambda w: _seconds(w.start_time)),
    ("resident_bytes", "What the process holds.", lambda w: w.memory.resident_bytes),
    ("mlx_active_bytes", "What MLX says is in use.", lambda w: w.memory.mlx_active_bytes),
    ("mlx_cache_bytes", "What MLX keeps for reuse.", lambda w: w.memory.mlx_cache_bytes),
    ("memory_peak_bytes", "The most that MLX had in use.", lambda w: w.memory.mlx_peak_bytes),
    ("unaccounted_bytes", "In use, but in no account.", lambda w: w.memory.unaccounted_bytes),
    ("figures_age_seconds", "How old these figures are.",
     lambda w: duration_from_pb(w.figures_age)),
    ("context_tokens", "The context in force.", lambda w: w.context_length),
    ("rows", "Streams that may be decoded side by side.", lambda w: w.rows_max),
    ("kv_tokens_used", "Tokens that running rows hold.", lambda w: w.kv_tokens_used),
    ("kv_tokens_capacity", "Tokens that rows may hold.", lambda w: w.kv_tokens_capacity),
)  # fmt: skip


def _of_workers(workers: Iterable[Worker]) -> Iterator[Metric]:
    """Yield the figures of each process: all those of live ones, the exit of failed ones."""
    by_identity = {(w.model_name, w.incarnation): w for w in workers}
    everyone = [({"model": name, "worker": number}, w) for (name, number), w in by_identity.items()]
    living = [(labels, w) for labels, w in everyone if not _has_ended(w)]
    yield _gauge("mlxd_worker_up", "Whether the process lives and its model is ready.",
                 ((labels, float(_ready(w))) for labels, w in everyone))  # fmt: skip
    yield _gauge("mlxd_worker_info", "What the process runs on; always 1.",
                 (({**labels, **_facts(w)}, 1) for labels, w in living))  # fmt: skip
    codes = ((labels, w.exit_code) for labels, w in everyone if w.HasField("exit_code"))
    yield _gauge("mlxd_worker_exit_code", "How the process ended; negative: the signal.", codes)
    cpu = Metric("mlxd_worker_cpu_seconds", "CPU time of the process.", "counter")
    for labels, worker in living:
        cpu.add_sample(cpu.name + TOTAL, labels, worker.cpu_seconds)
    yield cpu
    for name, text, value in _OF_WORKERS:
        points = ((labels, value(w)) for labels, w in living)
        yield _gauge(f"mlxd_worker_{name}", text, points)
    accounts = (
        ({**labels, "account": account.name}, account.bytes)
        for labels, w in living
        for account in w.memory.accounts
    )
    yield _gauge("mlxd_worker_memory_bytes", "What the process accounts for, by account.", accounts)


def _facts(worker: Worker) -> Labels:
    return {
        "digest": worker.model_digest,
        "address": worker.address,
        "backend": worker.backend,
        "device": ",".join(held.device for held in worker.memory.devices),
        "mlx_version": worker.mlx_version,
        "math_library": worker.math_library.name,
        "weights": types_pb2.WeightsFormat.Name(worker.weights)
        .removeprefix("WEIGHTS_FORMAT_")
        .lower(),
    }


def _has_ended(worker: Worker) -> bool:
    return worker.HasField("exit_code") or worker.state == types_pb2.MODEL_STATE_FAILED


def _ready(worker: Worker) -> bool:
    return worker.state == types_pb2.MODEL_STATE_READY and not _has_ended(worker)


def _labels_of(worker: Worker) -> Labels:
    return {"model_name": worker.model_name, "worker": worker.incarnation}


def _kv_use(worker: Worker) -> float:
    capacity = worker.kv_tokens_capacity
    return worker.kv_tokens_used / capacity if capacity else 0.0


def _blocks(worker: Worker) -> Labels:
    """A block is one token: rows are not paged, and blocks x size is then the true capacity."""
    size = {"block_size": "1", "num_gpu_blocks": str(worker.kv_tokens_capacity)}
    return {**_labels_of(worker), **size}


def _adapters(worker: Worker) -> Labels:
    none = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    return {**_labels_of(worker), **none}


_ALIASES: tuple[tuple[str, str, Callable[[Worker], Labels], Callable[[Worker], float]], ...] = (
    ("vllm:num_requests_running", "Alias: streams being decoded.",
     _labels_of, lambda w: w.streams_running),
    ("vllm:num_requests_waiting", "Alias: streams that wait in the worker.",
     _labels_of, lambda w: w.streams_waiting),
    ("vllm:kv_cache_usage_perc", "Alias: part of the KV tokens in use, 0 to 1.",
     _labels_of, _kv_use),
    ("vllm:cache_config_info", "Alias: size of the KV cache in labels; always 1.",
     _blocks, lambda _: 1.0),
    ("vllm:lora_requests_info", "Alias: there are no adapters; the worker's start time.",
     _adapters, lambda w: _seconds(w.start_time)),
)  # fmt: skip
"""Names that routers expect of every server."""
