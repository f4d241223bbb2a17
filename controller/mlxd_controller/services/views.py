"""The scheduler's models and reports as messages of the wire. Reads, never changes."""

from __future__ import annotations

import math
from typing import assert_never

from mlxd.v1 import types_pb2
from mlxd_controller.core import phases
from mlxd_controller.core.report import Report
from mlxd_controller.core.state import Model
from mlxd_controller.runtime.ports import BrokenRef, Clock, ModelRef
from mlxd_controller.runtime.worker import Worker
from mlxd_shared.domain.requests import DEFAULTS, LoadSpec, merge
from mlxd_shared.wire.convert import KV_FORMAT_TO_PB, WEIGHTS_TO_PB
from mlxd_shared.wire.records import timestamp_to_pb, write


def phase_to_pb(phase: phases.Phase) -> types_pb2.ModelState.ValueType:
    """Return the name of a phase."""
    match phase:
        case phases.Unloaded():
            name = types_pb2.MODEL_STATE_UNLOADED
        case phases.Queued():
            name = types_pb2.MODEL_STATE_QUEUED
        case phases.Loading():
            name = types_pb2.MODEL_STATE_LOADING
        case phases.Ready():
            name = types_pb2.MODEL_STATE_READY
        case phases.Draining():
            name = types_pb2.MODEL_STATE_DRAINING
        case phases.Unloading():
            name = types_pb2.MODEL_STATE_UNLOADING
        case phases.Failed():
            name = types_pb2.MODEL_STATE_FAILED
        case _ as never:
            assert_never(never)
    return name


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
    """Return a model as it is. `model` and `worker` are None where it was never asked for."""
    spec = LoadSpec() if model is None else model.spec
    pb = types_pb2.Model(
        name=ref.name,
        aliases=ref.aliases,
        digest=ref.digest,
        path=str(ref.path),
        store=ref.store,
        architecture=ref.facts.architecture,
        state=types_pb2.MODEL_STATE_UNLOADED,
        context_length_max=ref.facts.context_length_max,
        vocab_size=ref.facts.passes.vocab,
        stored_bytes=ref.facts.stored_bytes,
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
    pb.resident_bytes = figures.memory.total_nbytes
    pb.weights = WEIGHTS_TO_PB[figures.weights] or pb.weights
    pb.context_length = figures.context_length or pb.context_length
    if figures.kv_format is not None:
        pb.kv_format = KV_FORMAT_TO_PB[figures.kv_format]
        pb.prefix_cache_bytes = figures.prefix_cache_nbytes
    if figures.sampling is not None:
        pb.effective_sampling.CopyFrom(write(figures.sampling, types_pb2.SamplingOptions))


def report_to_pb(report: Report, ref: ModelRef, names: dict[str, str]) -> types_pb2.FitReport:
    """Return a fit report; `names` are the models' names by digest."""
    plan = report.plan
    return types_pb2.FitReport(
        model=ref.name,
        model_digest=ref.digest,
        fits_now=report.fits_now,
        fits_ever=report.fits_ever,
        terms=[
            types_pb2.FitTerm(name=term.name, bytes=term.nbytes, note=term.note)
            for term in plan.terms
        ],
        need_bytes=plan.need_bytes,
        budget_bytes=report.device.budget_bytes,
        available_bytes=report.available_bytes,
        reserve_bytes=report.device.reserve_bytes,
        device=plan.device,
        weights=WEIGHTS_TO_PB[plan.weights],
        context_length=plan.context_length,
        rows_max=plan.rows_max,
        would_evict=[names.get(digest, digest) for digest in report.would_evict],
        suggestions=report.suggestions,
        kv_format=KV_FORMAT_TO_PB[plan.kv_format],
        prefix_cache_bytes=plan.prefix_bytes,
    )
