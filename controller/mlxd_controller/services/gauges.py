"""A status's metrics: the controller's counters, and the gauges of the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlxd.v1 import status_pb2
from mlxd_controller.core.phases import Resident
from mlxd_controller.core.state import State
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.runtime.worker import Worker
from mlxd_shared.domain.figures import WorkerFigures
from mlxd_shared.ops.metrics import Counter, Gauges, labels
from mlxd_shared.wire.convert_status import counter_to_pb, gauge_to_pb, histogram_to_pb

_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerFigures], float]], ...] = (
    ("mlxd_requests_running", "Streams being decoded.", lambda w: w.streams_running),
    ("mlxd_requests_waiting", "Streams that wait inside a worker.", lambda w: w.streams_waiting),
    ("mlxd_kv_cache_usage_ratio", "Part of the rows' tokens in use.", lambda w: w.kv_use_ratio),
    ("mlxd_oldest_wait_seconds", "How long the oldest waiting stream has waited.",
     lambda w: w.oldest_wait_s or 0.0),
    ("mlxd_memory_measured_bytes", "What a worker accounts for.", lambda w: w.memory.total_nbytes),
    ("mlxd_memory_peak_bytes", "The most that MLX held in a worker.",
     lambda w: w.memory.mlx_peak_nbytes),
)  # fmt: skip


def families_to_pb(metrics: Metrics) -> list[status_pb2.MetricFamily]:
    """Return the controller's counters and histograms, even those without samples."""
    return [
        counter_to_pb(family) if isinstance(family, Counter) else histogram_to_pb(family)
        for family in metrics.families()
    ]


def gauges(state: State, workers: Iterable[Worker]) -> list[status_pb2.MetricFamily]:
    """Return every gauge for the wire."""
    measured = [(w.name, w.plan, w.figures) for w in workers if w.figures is not None]
    errors = {
        labels(model=name): peak / plan.arrays_bytes - 1
        for name, plan, figures in measured
        if (peak := figures.memory.mlx_peak_nbytes)
    }
    models = state.models.values()
    reserved = {
        labels(model=m.name, device=m.phase.plan.device): float(m.reserved_bytes)
        for m in models
        if isinstance(m.phase, Resident)
    }
    devices = [(labels(device=device.name), device) for device in state.devices]
    of_state: tuple[tuple[str, str, Gauges], ...] = (
        ("mlxd_load_wait_queue", "Requests that wait for their model to be ready.",
         {labels(model=m.name): float(len(m.waiters)) for m in models}),
        ("mlxd_fit_estimate_error_ratio",
         "How far the peak is from what was planned, process apart; above 0 it was too little.",
         errors),
        ("mlxd_memory_reserved_bytes", "What a model's plan reserves on its device.", reserved),
        ("mlxd_memory_budget_bytes", "What models may use in all, by device.",
         {key: float(device.budget_bytes) for key, device in devices}),
        ("mlxd_memory_held_bytes", "What workers hold in all, measured.",
         {key: float(state.held_on(device)) for key, device in devices}),
        ("mlxd_memory_pressed",
         "1 from when workers pass the hard mark until they are below the soft one.",
         {key: float(device.name in state.pressed) for key, device in devices}),
    )  # fmt: skip
    of_workers = (
        (name, text, {labels(model=model): figure(figures) for model, _, figures in measured})
        for name, text, figure in _OF_WORKERS
    )
    return [gauge_to_pb(*family) for family in (*of_workers, *of_state)]
