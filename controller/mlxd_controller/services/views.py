"""Models, workers and fit reports as messages of the wire."""

from __future__ import annotations

import math
from dataclasses import replace

from mlxd.v1 import status_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_controller.core.report import Report
from mlxd_controller.core.state import Model
from mlxd_controller.runtime.ports import BrokenRef, Clock, ModelRef
from mlxd_controller.runtime.worker import Worker
from mlxd_shared.domain.figures import WorkerFigures, WorkerMemory
from mlxd_shared.domain.requests import DEFAULTS, Weights, merge
from mlxd_shared.wire.convert import KV_FORMAT_TO_PB, WEIGHTS_TO_PB
from mlxd_shared.wire.records import duration_to_pb, timestamp_to_pb, write


def phase_to_pb(phase: phases.Phase) -> types_pb2.ModelState.ValueType:
    """Return the wire's name of a phase: its class's."""
    return types_pb2.ModelState.Value(f"MODEL_STATE_{type(phase).__name__.upper()}")


def broken_to_pb(ref: BrokenRef) -> types_pb2.Model:
    """Return a name whose files cannot be served."""
    return types_pb2.Model(
        name=ref.name,
        path=str(ref.path),
        store=ref.store,
        state=types_pb2.MODEL_STATE_FAILED,
        error=ref.error.describe(),
    )


def model_to_pb(
    ref: ModelRef, model: Model | None, worker: Worker | None, clock: Clock
) -> types_pb2.Model:
    """Return a model's state; `model` and `worker` are None if it was never requested."""
    spec = ref.configured if model is None else model.spec
    pb = types_pb2.Model(
        name=ref.name,
        aliases=ref.aliases,
        digest=ref.digest,
        path=str(ref.path),
        machine=ref.machine,
        store=ref.store,
        architecture=ref.facts.architecture,
        state=types_pb2.MODEL_STATE_UNLOADED,
        context_length_max=ref.facts.context_length_max,
        vocab_size=ref.facts.passes.vocab,
        stored_bytes=ref.facts.stored_bytes,
        has_pooling=ref.has_pooling,
        has_chat_template=ref.has_chat_template,
        has_vision=ref.facts.sight is not None,
        effective_sampling=write(
            merge(spec.sampling, ref.defaults, DEFAULTS), types_pb2.SamplingOptions
        ),
    )
    if model is None:
        return pb
    pb.state = phase_to_pb(model.phase)
    pb.path = model.path
    pb.error = "" if model.error is None else model.error.describe()
    pb.streams_active = len(model.leases)
    pb.pinned = model.pinned
    pb.priority = model.spec.priority or 0
    if isinstance(model.phase, phases.Loading):
        pb.progress.CopyFrom(write(model.phase.progress, types_pb2.LoadProgress))
    if isinstance(model.phase, phases.Resident):
        plan = model.phase.plan
        pb.device = plan.device
        pb.ranks = plan.ranks
        pb.context_length = plan.context_length
        pb.rows_max = plan.rows_max
        pb.weights = WEIGHTS_TO_PB[plan.weights]
        pb.kv_format = KV_FORMAT_TO_PB[plan.kv_format]
        pb.prefix_cache_bytes = plan.prefix_bytes
    _add_times(pb, model, clock)
    if worker is not None:
        _add_worker(pb, worker)
    return pb


def _add_times(pb: types_pb2.Model, model: Model, clock: Clock) -> None:
    now_s = clock.now_s()
    offset_s = clock.unix_s() - now_s
    if model.last_used_s:
        pb.last_used_time.CopyFrom(timestamp_to_pb(model.last_used_s + offset_s))
    if isinstance(model.phase, phases.Ready) and math.isfinite(model.keep_alive_s):
        expires_s = model.expires_s if model.idle else now_s + model.keep_alive_s
        pb.expire_time.CopyFrom(timestamp_to_pb(expires_s + offset_s))


def _add_worker(pb: types_pb2.Model, worker: Worker) -> None:
    pb.worker_incarnation = worker.incarnation
    figures = worker.figures
    if figures is None:
        return
    pb.resident_bytes = figures.memory.total_nbytes * worker.plan.ranks
    pb.prefix_reload.CopyFrom(duration_to_pb(figures.prefix_reload_s))
    pb.weights = WEIGHTS_TO_PB[figures.weights] or pb.weights
    pb.context_length = figures.context_length or pb.context_length
    if figures.kv_format is not None:
        pb.kv_format = KV_FORMAT_TO_PB[figures.kv_format]
        pb.prefix_cache_bytes = figures.prefix_cache_nbytes
    if figures.sampling is not None:
        pb.effective_sampling.CopyFrom(write(figures.sampling, types_pb2.SamplingOptions))


def report_to_pb(report: Report, ref: ModelRef, names: dict[str, str]) -> types_pb2.FitReport:
    """Return a fit report; `names` maps digests to names."""
    plan = report.plan
    return types_pb2.FitReport(
        model=ref.name,
        model_digest=ref.digest,
        fits_now=report.fits_now,
        fits_ever=report.fits_ever,
        terms=[write(term, types_pb2.FitTerm) for term in plan.terms],
        need_bytes=plan.need_bytes,
        budget_bytes=report.device.budget_bytes,
        available_bytes=report.available_bytes,
        reserve_bytes=report.device.reserve_bytes,
        device=plan.device,
        weights=WEIGHTS_TO_PB[plan.weights],
        context_length=plan.context_length,
        rows_max=plan.rows_max,
        would_evict=[names.get(digest, digest) for digest in report.would_evict],
        absences=[
            types_pb2.Absence(
                model=names.get(each.digest, each.digest),
                reload=duration_to_pb(each.load_s),
                prompts=duration_to_pb(each.prompts_s),
            )
            for each in report.absences
        ],
        suggestions=report.suggestions,
        kv_format=KV_FORMAT_TO_PB[plan.kv_format],
        prefix_cache_bytes=plan.prefix_bytes,
        ranks=plan.ranks,
    )


def worker_to_pb(worker: Worker, model: Model | None, clock: Clock) -> status_pb2.WorkerStatus:
    """Return a worker's status; `model` is None once the scheduler has dropped the worker."""
    figures = _figures(worker, clock)
    if worker.exit_code is not None:
        figures = _without_holdings(replace(figures, exit_code=worker.exit_code))
    pb = write(figures, status_pb2.WorkerStatus)
    pb.state = types_pb2.MODEL_STATE_UNLOADING if model is None else phase_to_pb(model.phase)
    if worker.error is not None:
        pb.state = types_pb2.MODEL_STATE_FAILED
        pb.last_error = worker.error.describe()
        pb.last_lines[:] = worker.last_lines()
    if model is not None and isinstance(model.phase, phases.Loading):
        pb.progress.CopyFrom(write(model.phase.progress, types_pb2.LoadProgress))
    return pb


def _figures(worker: Worker, clock: Clock) -> WorkerFigures:
    """Return the worker's own figures, completed from its plan and the system's."""
    own, plan, process = worker.figures or WorkerFigures(), worker.plan, worker.process
    age_s, memory = own.age_s, own.memory
    if process is not None and worker.resident_nbytes is not None:
        memory = replace(memory, resident_nbytes=worker.resident_nbytes)
    if worker.figures is not None:
        age_s = worker.figures_age_s(clock.now_s())
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
        memory=memory,
        pid=own.pid if process is None else process.pid,
        address=own.address if process is None else process.address,
    )


def _without_holdings(figures: WorkerFigures) -> WorkerFigures:
    """Drop what a process holds only while alive; the peak of MLX stays."""
    return replace(
        figures,
        memory=WorkerMemory(mlx_peak_nbytes=figures.memory.mlx_peak_nbytes),
        streams_running=0,
        streams_waiting=0,
        oldest_wait_s=None,
        kv_tokens_used=0,
        prefix_disk=None,
        prefix_reload_s=0.0,
    )
