"""What `mlxd top` shows, from what the server says: rates out of counters, lines out of states.

Pure. Counters only mean something between two looks at one server: when it has started anew, the
looks from before are dropped.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mlxd.messages import DeviceStatus, Model, Status, WorkerStatus
from mlxd_shared.domain.figures import MemoryAccount, ModelState

SPEED_SPAN_S = 3.0
"""Tokens a second are those of so long; shorter would jump with each message of a stream."""
FIRST_SPAN_S = 60.0
"""First-token times are those of the requests of so long."""
LOOKS_MAX = 1024
_TOKENS = "mlxd_generation_tokens_total"
_FIRST = "mlxd_time_to_first_token_seconds"
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class Look:
    """The counters of one status: tokens, and first tokens by bucket, of each model."""

    at_s: float
    start_time: dt.datetime | None
    tokens: Mapping[str, float]
    first: Mapping[str, tuple[int, ...]]
    bounds_s: tuple[float, ...] = ()
    """Upper bounds of the buckets but for the last, which has none."""


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One model in memory, or on its way there or out. None: not known."""

    name: str
    state: ModelState
    loaded_fraction: float | None
    tokens_per_s: float | None
    running: int
    waiting: int
    first_token_s: float | None
    held_nbytes: int
    device: str
    accounts: tuple[MemoryAccount, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """All that a frame shows of the server."""

    version: str = ""
    up_s: float = 0.0
    devices: tuple[DeviceStatus, ...] = ()
    models: tuple[ModelLine, ...] = ()
    host_total_nbytes: int = 0
    host_available_nbytes: int = 0


@dataclass(slots=True)
class Looks:
    """The looks that rates are made of, oldest first. Mutable; one owner."""

    kept: list[Look] = field(default_factory=list)

    def add(self, status: Status) -> None:
        """Take a status; drop what is too old to matter, or another server's."""
        look = look_at(status)
        same = [each for each in self.kept if each.start_time == look.start_time]
        recent = [each for each in same if each.at_s >= look.at_s - FIRST_SPAN_S]
        before = [each for each in same if each.at_s < look.at_s - FIRST_SPAN_S][-1:]
        self.kept = [*before, *recent, look][-LOOKS_MAX:]


def look_at(status: Status) -> Look:
    """Return the counters of a status that `mlxd top` uses."""
    tokens: dict[str, float] = {}
    first: dict[str, tuple[int, ...]] = {}
    bounds: tuple[float, ...] = ()
    for family in status.metrics:
        for point in family.points:
            model = point.labels.get(_MODEL, "")
            if family.name == _TOKENS:
                tokens[model] = tokens.get(model, 0.0) + point.value
            elif family.name == _FIRST and point.histogram is not None:
                bounds = point.histogram.bounds
                first[model] = point.histogram.counts
    at_s = status.now.timestamp() if status.now is not None else 0.0
    return Look(at_s, status.start_time, tokens, first, bounds)


def view_of(status: Status, models: Sequence[Model], looks: Sequence[Look]) -> View:
    """Return what a frame shows. looks: those up to this status, oldest first."""
    up_s = 0.0
    if status.now is not None and status.start_time is not None:
        up_s = (status.now - status.start_time).total_seconds()
    workers = {worker.model_name: worker for worker in status.workers if worker.exit_code is None}
    lines = (
        _line(model, workers.get(model.name), looks)
        for model in models
        if model.state is not ModelState.UNLOADED
    )
    host = status.host_memory
    return View(
        version=status.version,
        up_s=up_s,
        devices=status.devices,
        models=tuple(lines),
        host_total_nbytes=host.total_nbytes,
        host_available_nbytes=host.available_nbytes,
    )


def _line(model: Model, worker: WorkerStatus | None, looks: Sequence[Look]) -> ModelLine:
    running = worker.streams_running if worker is not None else 0
    in_worker = worker.streams_waiting if worker is not None else 0
    progress = model.progress
    is_loading = model.state is ModelState.LOADING and progress.bytes_total > 0
    return ModelLine(
        name=model.name,
        state=model.state,
        loaded_fraction=progress.bytes_read / progress.bytes_total if is_loading else None,
        tokens_per_s=speed_of(model.name, looks),
        running=running,
        # Streams that wait for their model to be loaded are in no worker yet.
        waiting=max(in_worker, model.streams_active - running),
        first_token_s=first_token(model.name, looks),
        held_nbytes=worker.memory.total_nbytes if worker is not None else model.resident_nbytes,
        device=model.device,
        accounts=worker.memory.accounts if worker is not None else (),
        error=model.error,
    )


def speed_of(model: str, looks: Sequence[Look]) -> float | None:
    """Return the tokens a second of the last SPEED_SPAN_S; None before there are two looks."""
    pair = _ends(looks, SPEED_SPAN_S)
    if pair is None:
        return None
    old, new = pair
    return (new.tokens.get(model, 0.0) - old.tokens.get(model, 0.0)) / (new.at_s - old.at_s)


def first_token(model: str, looks: Sequence[Look]) -> float | None:
    """Return the median first-token time, in seconds, of the last FIRST_SPAN_S; None: no request.

    At the first look it is that of all requests since the server began. Within a bucket times are
    taken to be evenly spread, as Prometheus' histogram_quantile has it.
    """
    if not looks:
        return None
    new = looks[-1]
    counts = new.first.get(model, ())
    pair = _ends(looks, FIRST_SPAN_S)
    before = pair[0].first.get(model, ()) if pair is not None else ()
    if before:
        counts = tuple(now - then for now, then in zip(counts, before, strict=True))
    return median(counts, new.bounds_s)


def median(counts: Sequence[int], bounds_s: Sequence[float]) -> float | None:
    """Return the median of a histogram; that of one beyond all bounds is the last bound."""
    half = sum(counts) / 2
    if half <= 0:
        return None
    below = 0
    for (low, high), count in zip(pairwise((0.0, *bounds_s)), counts, strict=False):
        if count and below + count >= half:
            return low + (high - low) * (half - below) / count
        below += count
    return bounds_s[-1] if bounds_s else None


def _ends(looks: Sequence[Look], span_s: float) -> tuple[Look, Look] | None:
    """Return the last look, and the latest that is `span_s` older, or the first one there is."""
    if len(looks) < 2:
        return None
    new = looks[-1]
    older = [look for look in looks[:-1] if look.at_s <= new.at_s - span_s]
    old = older[-1] if older else looks[0]
    return (old, new) if new.at_s > old.at_s else None
