"""What the page is shown of models and of a server's status: plain values, bytes and seconds. Pure.

Times are seconds since 1970 by the server's clock; None where there is none.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

import msgspec

from mlxd import (
    DeviceStatus,
    HostMemory,
    LogLines,
    MetricFamily,
    Model,
    ModelState,
    Status,
    WorkerStatus,
)
from mlxd_gateway.page.rights import Rights

_GENERATED = "mlxd_generation_tokens_total"
_PROMPT = "mlxd_prompt_tokens_total"
_CACHED = "mlxd_cached_tokens_total"
_FIRST = "mlxd_time_to_first_token_seconds"


class SessionView(msgspec.Struct, frozen=True):
    """Who looks at the page: what they may do."""

    version: str
    rights: Rights


class ModelView(msgspec.Struct, frozen=True):
    """One model. `read_nbytes` of `total_nbytes` are loaded; 0 of 0 while nobody knows."""

    name: str
    aliases: tuple[str, ...]
    digest: str
    architecture: str
    store: str
    state: ModelState
    stage: str
    read_nbytes: int
    total_nbytes: int
    error: str
    context_length: int
    context_length_max: int
    stored_nbytes: int
    resident_nbytes: int
    device: str
    weights: str
    kv_format: str | None
    rows_max: int
    streams: int
    pinned: bool
    last_used: float | None
    expires: float | None
    chats: bool
    """Whether it has a chat template."""
    sees: bool
    """Whether it sees the images of a chat."""


class DeviceView(msgspec.Struct, frozen=True):
    """One device's memory."""

    name: str
    kind: str
    product: str
    total_nbytes: int
    budget_nbytes: int
    reserved_nbytes: int
    usable_nbytes: int
    held_nbytes: int
    pressed: bool
    lost: bool


class WorkerView(msgspec.Struct, frozen=True):
    """One worker: what it holds, by account, and what it is doing."""

    model: str
    pid: int
    alive: bool
    """Whether its process has not ended."""
    state: ModelState
    accounts: dict[str, int]
    pool_nbytes: int
    """What MLX keeps for later beside the accounts."""
    unaccounted_nbytes: int
    resident_nbytes: int
    devices: dict[str, int]
    running: int
    waiting: int
    oldest_wait_s: float
    rows_max: int
    kv_tokens: int
    kv_tokens_max: int
    backend: str
    weights: str
    error: str


class FirstTokens(msgspec.Struct, frozen=True):
    """How many first tokens came within each bound and above the one before, in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class CountsView(msgspec.Struct, frozen=True):
    """Counters of one model since the server's start: only their differences say something."""

    generated: int
    prompt: int
    cached: int
    first: FirstTokens | None


class HostView(msgspec.Struct, frozen=True):
    """The memory of the machine on which the controller runs."""

    total_nbytes: int
    available_nbytes: int
    resident_nbytes: int


class StatusView(msgspec.Struct, frozen=True):
    """One moment of a server. Another `start` means that all counters began anew."""

    version: str
    now: float
    start: float
    host: HostView
    devices: tuple[DeviceView, ...]
    workers: tuple[WorkerView, ...]
    counts: dict[str, CountsView]


class LogView(msgspec.Struct, frozen=True):
    """Lines of a worker's; `missed` before them were dropped."""

    lines: tuple[str, ...]
    missed: int
    pid: int


def view_model(model: Model) -> ModelView:
    """Return one model as the page shows it."""
    return ModelView(
        name=model.name,
        aliases=model.aliases,
        digest=model.digest,
        architecture=model.architecture,
        store=model.store,
        state=model.state,
        stage=model.progress.stage,
        read_nbytes=model.progress.bytes_read,
        total_nbytes=model.progress.bytes_total,
        error=model.error,
        context_length=model.context_length,
        context_length_max=model.context_length_max,
        stored_nbytes=model.stored_nbytes,
        resident_nbytes=model.resident_nbytes,
        device=model.device,
        weights=model.weights.value,
        kv_format=model.kv_format and model.kv_format.value,
        rows_max=model.rows_max,
        streams=model.streams_active,
        pinned=model.pinned,
        last_used=_seconds(model.last_used_time),
        expires=_seconds(model.expire_time),
        chats=model.has_chat_template,
        sees=model.has_vision,
    )


def view_status(status: Status) -> StatusView:
    """Return one moment of a server as the page shows it."""
    return StatusView(
        version=status.version,
        now=_seconds(status.now) or 0.0,
        start=_seconds(status.start_time) or 0.0,
        host=_view_host(status.host_memory),
        devices=tuple(map(_view_device, status.devices)),
        workers=tuple(map(_view_worker, status.workers)),
        counts=_count(status.metrics),
    )


def view_log(lines: LogLines) -> LogView:
    """Return lines of a worker's as the page shows them."""
    return LogView(lines.lines, lines.missed_lines, lines.pid)


def _seconds(moment: dt.datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _view_host(memory: HostMemory) -> HostView:
    return HostView(memory.total_nbytes, memory.available_nbytes, memory.resident_nbytes)


def _view_device(device: DeviceStatus) -> DeviceView:
    return DeviceView(
        name=device.name,
        kind=device.kind,
        product=device.product,
        total_nbytes=device.total_nbytes,
        budget_nbytes=device.budget_nbytes,
        reserved_nbytes=device.reserved_nbytes,
        usable_nbytes=device.usable_nbytes,
        held_nbytes=device.held_nbytes,
        pressed=device.pressed,
        lost=device.lost,
    )


def _view_worker(worker: WorkerStatus) -> WorkerView:
    memory = worker.memory
    return WorkerView(
        model=worker.model_name,
        pid=worker.pid,
        alive=worker.exit_code is None,
        state=worker.state,
        accounts={account.name: account.nbytes for account in memory.accounts},
        pool_nbytes=memory.mlx_cache_nbytes,
        unaccounted_nbytes=memory.unaccounted_nbytes,
        resident_nbytes=memory.resident_nbytes,
        devices=dict(memory.devices),
        running=worker.streams_running,
        waiting=worker.streams_waiting,
        oldest_wait_s=worker.oldest_wait_s,
        rows_max=worker.rows_max,
        kv_tokens=worker.kv_tokens_used,
        kv_tokens_max=worker.kv_tokens_capacity,
        backend=worker.backend,
        weights=worker.weights.value,
        error=worker.last_error,
    )


def _count(families: Iterable[MetricFamily]) -> dict[str, CountsView]:
    """Return the counters by model, of all that were ever used."""
    named = {family.name: family for family in families}
    sums = {name: _sums(named.get(name)) for name in (_GENERATED, _PROMPT, _CACHED)}
    first = _first_tokens(named.get(_FIRST))
    models = set(first).union(*sums.values())
    return {
        model: CountsView(
            generated=round(sums[_GENERATED].get(model, 0)),
            prompt=round(sums[_PROMPT].get(model, 0)),
            cached=round(sums[_CACHED].get(model, 0)),
            first=first.get(model),
        )
        for model in sorted(models)
    }


def _sums(family: MetricFamily | None) -> dict[str, float]:
    points = () if family is None else family.points
    return {point.labels.get("model", ""): point.value for point in points}


def _first_tokens(family: MetricFamily | None) -> dict[str, FirstTokens]:
    points = () if family is None else family.points
    return {
        point.labels.get("model", ""): FirstTokens(point.histogram.bounds, point.histogram.counts)
        for point in points
        if point.histogram is not None
    }
