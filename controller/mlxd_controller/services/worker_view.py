"""One worker as a message of the wire: its own figures, and what only its parent knows.

Invariant: a view only reads; whose worker it is has noted everything before.
"""

from __future__ import annotations

from dataclasses import replace

from mlxd.v1 import status_pb2, types_pb2
from mlxd_controller.core.phases import Loading
from mlxd_controller.core.state import Model
from mlxd_controller.runtime.ports import Clock
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.services.views import phase_to_pb
from mlxd_shared.domain.figures import MemoryFigures, WorkerFigures
from mlxd_shared.domain.requests import Weights
from mlxd_shared.wire.records import write


def worker_to_pb(worker: Worker, model: Model | None, clock: Clock) -> status_pb2.WorkerStatus:
    """Return a worker's status; `model` is None where the scheduler has no use for it any more."""
    figures = _with_end(_with_process(_figures(worker, clock), worker), worker)
    pb = write(figures, status_pb2.WorkerStatus)
    pb.state = _state(worker, model)
    if model is not None and isinstance(model.phase, Loading):
        pb.progress.CopyFrom(write(model.phase.progress, types_pb2.LoadProgress))
    return pb


def _state(worker: Worker, model: Model | None) -> types_pb2.ModelState.ValueType:
    if worker.error is not None:
        return types_pb2.MODEL_STATE_FAILED
    return types_pb2.MODEL_STATE_UNLOADING if model is None else phase_to_pb(model.phase)


def _figures(worker: Worker, clock: Clock) -> WorkerFigures:
    """Return what the worker has said, and its plan where it has said nothing yet."""
    own, plan = worker.figures or WorkerFigures(), worker.plan
    age_s = own.age_s
    if worker.figures is not None:
        # A worker that is busy tells figures of some age itself; since then they have aged here.
        age_s = (own.age_s or 0.0) + max(0.0, clock.now_s() - worker.figures_s)
    return replace(
        own,
        incarnation=worker.incarnation,
        started_unix_s=worker.started_unix_s,
        model_name=worker.name,
        model_path=worker.path,
        model_digest=worker.digest,
        context_length=own.context_length or plan.context_length,
        rows_max=own.rows_max or plan.rows_max,
        weights=plan.weights if own.weights is Weights.AUTO else own.weights,
        kv_format=own.kv_format or plan.kv_format,
        prefix_cache_nbytes=own.prefix_cache_nbytes if own.kv_format else plan.prefix_bytes,
        age_s=age_s,
        cpu_s=worker.cpu_s,
    )


def _with_process(figures: WorkerFigures, worker: Worker) -> WorkerFigures:
    if worker.process is None:
        return figures
    memory = figures.memory
    if worker.resident_nbytes is not None:
        memory = replace(memory, resident_nbytes=worker.resident_nbytes)
    return replace(figures, pid=worker.process.pid, address=worker.process.address, memory=memory)


def _with_end(figures: WorkerFigures, worker: Worker) -> WorkerFigures:
    if worker.exit_code is not None:
        figures = _without_holdings(replace(figures, exit_code=worker.exit_code))
    if worker.error is not None:
        figures = replace(
            figures, last_error=worker.error.describe(), last_lines=worker.last_lines()
        )
    return figures


def _without_holdings(figures: WorkerFigures) -> WorkerFigures:
    """Drop what a process holds only while it lives: the last figures told of memory and streams.

    The most that MLX ever held is history, and stays.
    """
    return replace(
        figures,
        memory=MemoryFigures(mlx_peak_nbytes=figures.memory.mlx_peak_nbytes),
        streams_running=0,
        streams_waiting=0,
        oldest_wait_s=None,
        kv_tokens_used=0,
    )
