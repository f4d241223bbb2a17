"""What a status says in metrics: what has been counted, and the gauges of this moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlxd.v1 import status_pb2
from mlxd_controller.core.phases import Resident
from mlxd_controller.core.state import State
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.runtime.worker import Worker
from mlxd_shared.domain.figures import WorkerFigures
from mlxd_shared.ops.metrics import Gauges, labels
from mlxd_shared.wire.convert_status import counter_to_pb, gauge_to_pb, histogram_to_pb

Figure = Callable[[WorkerFigures], float]


def families_to_pb(metrics: Metrics) -> list[status_pb2.MetricFamily]:
    """Return what the controller counts, empty families too."""
    return [
        *map(counter_to_pb, metrics.counters()),
        *map(histogram_to_pb, metrics.histograms()),
    ]


def gauges(state: State, workers: Iterable[Worker]) -> list[status_pb2.MetricFamily]:
    """Return every gauge for the wire."""
    measured = [(w.name, w.plan, w.figures) for w in workers if w.figures is not None]

    def each(figure: Figure) -> Gauges:
        return {labels(model=name): figure(figures) for name, _, figures in measured}

    waiting = {labels(model=m.name): float(len(m.waiters)) for m in state.models.values()}
    peaks = [(name, plan, figures.memory.mlx_peak_nbytes) for name, plan, figures in measured]
    errors = {
        labels(model=name): peak / plan.arrays_bytes - 1 for name, plan, peak in peaks if peak
    }
    devices = state.devices
    held = {labels(device=d.name): float(state.held_on(d)) for d in devices}
    pressed = {labels(device=d.name): float(d.name in state.pressed) for d in devices}
    budgets = {labels(device=d.name): float(d.budget_bytes) for d in devices}
    reserved = {
        labels(model=m.name, device=m.phase.plan.device): float(m.reserved_bytes)
        for m in state.models.values()
        if isinstance(m.phase, Resident)
    }
    return [
        gauge_to_pb(
            "mlxd_requests_running", "Streams being decoded.", each(lambda w: w.streams_running)
        ),
        gauge_to_pb(
            "mlxd_requests_waiting",
            "Streams that wait inside a worker.",
            each(lambda w: w.streams_waiting),
        ),
        gauge_to_pb(
            "mlxd_load_wait_queue", "Requests that wait for their model to be ready.", waiting
        ),
        gauge_to_pb(
            "mlxd_kv_cache_usage_ratio",
            "Part of the rows' tokens in use.",
            each(lambda w: w.kv_use_ratio),
        ),
        gauge_to_pb(
            "mlxd_oldest_wait_seconds",
            "How long the oldest waiting stream has waited.",
            each(lambda w: w.oldest_wait_s or 0.0),
        ),
        gauge_to_pb(
            "mlxd_memory_measured_bytes",
            "What a worker accounts for.",
            each(lambda w: w.memory.total_nbytes),
        ),
        gauge_to_pb(
            "mlxd_memory_peak_bytes",
            "The most that MLX held in a worker.",
            each(lambda w: w.memory.mlx_peak_nbytes),
        ),
        gauge_to_pb(
            "mlxd_fit_estimate_error_ratio",
            "How far the peak is from what was planned, process apart; above 0 it was too little.",
            errors,
        ),
        gauge_to_pb(
            "mlxd_memory_reserved_bytes", "What a model's plan reserves on its device.", reserved
        ),
        gauge_to_pb("mlxd_memory_budget_bytes", "What models may use in all, by device.", budgets),
        gauge_to_pb("mlxd_memory_held_bytes", "What workers hold in all, measured.", held),
        gauge_to_pb(
            "mlxd_memory_pressed",
            "1 from when workers pass the hard mark until they are below the soft one.",
            pressed,
        ),
    ]
