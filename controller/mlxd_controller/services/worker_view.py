"""One worker as a message of the wire: its own figures, and what only its parent knows."""

from __future__ import annotations

import psutil

from mlxd.v1 import status_pb2, types_pb2
from mlxd_controller.core.state import Model, Phase
from mlxd_controller.ports import Clock
from mlxd_controller.services.views import PHASE_TO_PB, progress_to_pb
from mlxd_controller.workers import Worker
from mlxd_shared.convert import (
    KV_FORMAT_TO_PB,
    WEIGHTS_TO_PB,
    duration_from_pb,
    duration_to_pb,
    timestamp_to_pb,
)


def worker_to_pb(worker: Worker, model: Model | None, clock: Clock) -> status_pb2.WorkerStatus:
    """Return a worker's status; `model` is None where the scheduler has no use for it any more."""
    pb = status_pb2.WorkerStatus()
    if worker.figures is not None:
        pb.CopyFrom(worker.figures)
        # A worker that is busy tells figures of some age itself; since then they have aged here.
        age_s = duration_from_pb(pb.figures_age) + max(0.0, clock.now_s() - worker.figures_s)
        pb.figures_age.CopyFrom(duration_to_pb(age_s))
    pb.incarnation = worker.incarnation
    pb.model_name = worker.name
    pb.model_path = worker.path
    pb.model_digest = worker.digest
    pb.state = _state(worker, model)
    pb.start_time.CopyFrom(timestamp_to_pb(worker.started_unix_s))
    pb.context_length = pb.context_length or worker.plan.context_length
    pb.rows_max = pb.rows_max or worker.plan.rows_max
    pb.weights = pb.weights or WEIGHTS_TO_PB[worker.plan.weights]
    if not pb.kv_format:  # one that is loading has told nothing of it yet
        pb.kv_format = KV_FORMAT_TO_PB[worker.plan.kv_format]
        pb.prefix_cache_bytes = worker.plan.prefix_bytes
    if model is not None and model.phase is Phase.LOADING:
        pb.progress.CopyFrom(progress_to_pb(model.progress))
    _add_process(pb, worker)
    pb.cpu_seconds = worker.cpu_s = max(worker.cpu_s, pb.cpu_seconds)
    _add_end(pb, worker)
    return pb


def _state(worker: Worker, model: Model | None) -> types_pb2.ModelState.ValueType:
    if worker.error is not None:
        return types_pb2.MODEL_STATE_FAILED
    return types_pb2.MODEL_STATE_UNLOADING if model is None else PHASE_TO_PB[model.phase]


def _add_process(pb: status_pb2.WorkerStatus, worker: Worker) -> None:
    if worker.process is None:
        return
    pb.pid = worker.process.pid
    pb.address = worker.process.address
    if worker.process.exit_code is not None or not worker.local:
        return  # a worker elsewhere tells its own figures
    try:
        process = psutil.Process(worker.process.pid)
        with process.oneshot():
            times = process.cpu_times()
            pb.memory.resident_bytes = process.memory_info().rss
            pb.cpu_seconds = times.user + times.system
    except psutil.NoSuchProcess:
        return  # it is ending; the exit code follows


def _add_end(pb: status_pb2.WorkerStatus, worker: Worker) -> None:
    code = worker.exit_code
    if code is not None:
        pb.exit_code = code
        _forget_held(pb)
    if worker.error is not None:
        pb.last_error = worker.error.describe()
        del pb.last_lines[:]
        pb.last_lines.extend(worker.last_lines())


def _forget_held(pb: status_pb2.WorkerStatus) -> None:
    """Drop what a process holds only while it lives: the last figures told of memory and streams.

    The most that MLX ever held is history, and stays.
    """
    peak_nbytes = pb.memory.mlx_peak_bytes
    pb.ClearField("memory")
    pb.memory.mlx_peak_bytes = peak_nbytes
    for name in ("streams_running", "streams_waiting", "oldest_wait", "kv_tokens_used"):
        pb.ClearField(name)
