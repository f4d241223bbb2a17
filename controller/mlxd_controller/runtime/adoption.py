"""Workers that this controller did not launch, as its runtime and its scheduler know them."""

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
    survivors: Iterable[Survivor], state: State, clock: Clock, *, local: bool = True
) -> Iterator[tuple[Worker, Adopted]]:
    """Yield each worker as the runtime keeps it, and what the scheduler is to be told of it.

    Those first who are to stay where there is no room for all: pinned models, then by priority,
    then whose loading took longest. local: whether they are processes of this machine.
    """

    def rank(survivor: Survivor) -> tuple[bool, int, float, str]:
        spec = survivor.holding.spec
        return (not spec.pinned, -(spec.priority or 0), -survivor.holding.load_s, survivor.ref.name)

    for number, survivor in enumerate(sorted(survivors, key=rank), start=state.next_worker):
        # The scheduler has one on an unknown device ended: its plan is for the record alone.
        stand_in = replace(state.devices[0], name=survivor.device)
        device = state.device_named(survivor.device) or stand_in
        worker, event = _enrol(survivor, number, device, clock)
        worker.local = local
        yield worker, event


def _enrol(survivor: Survivor, number: int, device: Device, clock: Clock) -> tuple[Worker, Adopted]:
    ref, holding, figures = survivor.ref, survivor.holding, survivor.figures
    choice = Choice(
        weights=figures.weights,
        context_length=figures.context_length,
        rows_max=figures.rows_max,
        kv_format=figures.kv_format or KVFormat.MODEL,
        prefix_bytes=figures.prefix_cache_nbytes,
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
    """Have the model's worker remember what it holds, where that is no longer what it was."""
    if worker is None or worker.process is None:
        return
    if former is None or _describe_change(former) != _describe_change(model):
        worker.process.remember(holding_of(model, keep_alive_s=keep_alive_s))


def _describe_change(model: Model) -> tuple[object, ...]:
    """Return what word is left of; most changes of a model are others."""
    ready = isinstance(model.phase, Ready)
    return (ready, model.worker, model.spec, model.pinned, model.keep_alive_s, model.load_s)


def holding_of(model: Model, *, keep_alive_s: float) -> Holding | None:
    """Return what a later controller must know of a model's worker; None: not to be taken over.

    keep_alive_s: this controller's default, which is not written down: the later one has its own.
    """
    if not isinstance(model.phase, Ready):
        return None
    own_s = None if model.keep_alive_s == keep_alive_s else model.keep_alive_s
    spec = replace(model.spec, keep_alive_s=own_s, pinned=model.pinned)
    return Holding(model.digest, model.name, model.path, spec, model.load_s)
