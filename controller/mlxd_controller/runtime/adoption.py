"""Takes over the workers of an earlier controller, and records what a later one must know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mlxd_controller.core.events import Adopted
from mlxd_controller.core.phases import Ready
from mlxd_controller.core.state import Model, State
from mlxd_controller.runtime.ports import Clock, Holding, Survivor
from mlxd_controller.runtime.worker import Worker
from mlxd_models.fit.plan import Choice, Device
from mlxd_models.fit.terms import reckon
from mlxd_shared.domain.requests import KVFormat


def enrol(
    survivors: Iterable[Survivor],
    state: State,
    clock: Clock,
    *,
    local: bool = True,
    endable: bool = True,
) -> Iterator[tuple[Worker, Adopted]]:
    """Yield each worker as the runtime keeps it, with the event that tells the scheduler about it.

    The order decides who stays if there is no room for all: pinned models first, then by priority,
    then by the time the load took. local, endable: see `Ports`.
    """

    def rank(survivor: Survivor) -> tuple[bool, int, float, str]:
        spec = survivor.holding.spec
        return (not spec.pinned, -(spec.priority or 0), -survivor.holding.load_s, survivor.ref.name)

    for number, survivor in enumerate(sorted(survivors, key=rank), start=state.next_worker):
        # The scheduler stops a worker on an unknown device: its plan only completes the record.
        stand_in = replace(state.devices[0], name=survivor.device)
        device = state.device_named(survivor.device) or stand_in
        worker, event = _enrol(survivor, number, device, clock)
        worker.local, worker.endable = local, endable
        yield worker, event


def _enrol(survivor: Survivor, number: int, device: Device, clock: Clock) -> tuple[Worker, Adopted]:
    ref, holding, figures = survivor.ref, survivor.holding, survivor.figures
    choice = Choice(
        weights=figures.weights,
        context_length=figures.context_length,
        rows_max=figures.rows_max,
        kv_format=figures.kv_format or KVFormat.MODEL,
        prefix_bytes=figures.prefix_cache_nbytes,
        ranks=device.ranks,
    )
    event = Adopted(
        worker=number,
        digest=ref.digest,
        name=ref.name,
        path=str(ref.path),
        facts=ref.facts,
        choice=choice,
        device=survivor.device,
        spec=holding.spec,
        load_s=holding.load_s,
        configured=ref.configured,
    )
    worker = Worker(
        number=number,
        digest=ref.digest,
        name=ref.name,
        path=str(ref.path),
        plan=reckon(ref.facts, device, choice),
        incarnation=survivor.process.incarnation,
        started_unix_s=figures.started_unix_s,
        process=survivor.process,
        link=survivor.link,
        ready_s=clock.now_s(),
    )
    worker.note_figures(figures, clock.now_s())
    return worker, event


def leave_word(
    worker: Worker | None, former: Model | None, model: Model, *, keep_alive_s: float
) -> None:
    """Have the worker's record updated if what a later controller must know has changed."""
    if worker is None or worker.process is None:
        return
    if former is None or _entry_of(former) != _entry_of(model):
        worker.process.remember(holding_of(model, keep_alive_s=keep_alive_s))


def _entry_of(model: Model) -> tuple[object, ...]:
    ready = isinstance(model.phase, Ready)
    return (ready, model.worker, model.spec, model.pinned, model.keep_alive_s, model.load_s)


def holding_of(model: Model, *, keep_alive_s: float) -> Holding | None:
    """Return what a later controller must know of a model's worker; None if it cannot be adopted.

    keep_alive_s: this controller's default. It is not recorded: the later controller has its own.
    """
    if not isinstance(model.phase, Ready):
        return None
    own_s = None if model.keep_alive_s == keep_alive_s else model.keep_alive_s
    spec = replace(model.spec, keep_alive_s=own_s, pinned=model.pinned)
    return Holding(model.digest, model.name, model.path, spec, model.load_s)
