"""What a load would do, without doing it: the answer to LoadModel.validate_only. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_controller.core import advice, evict, fit
from mlxd_controller.core.options import merged
from mlxd_controller.core.room import room_of
from mlxd_controller.core.state import JOINABLE, RESIDENT, State
from mlxd_controller.core.victims import victims_of
from mlxd_shared.requests import LoadSpec


@dataclass(frozen=True, slots=True)
class Report:
    """A plan and how it meets the memory there is. `would_evict` are digests."""

    plan: fit.Plan
    device: fit.Device
    fits_now: bool
    fits_ever: bool
    available_bytes: int
    would_evict: tuple[str, ...]
    suggestions: tuple[str, ...]


def report(state: State, digest: str, facts: fit.ModelFacts, spec: LoadSpec) -> Report:
    """Return what a load of this model with `spec` would need, evict and come up against.

    A resident model is reckoned as if its own memory were free; by the plan in force while it keeps
    that, which `options.conflict` says of a `spec`.
    """
    model = state.models.get(digest)
    device = state.device
    if model is not None:
        spec = merged(spec, model.spec)
    room = room_of(state)
    resident = model is not None and model.phase in RESIDENT
    available, slots = room.free_bytes, room.free_slots
    if model is not None and resident:
        available, slots = available + model.reserved_bytes, slots + 1
    in_force = model.plan if model is not None and model.phase in JOINABLE else None
    known = () if model is None else model.measured
    plan = in_force or fit.plan(facts, spec, device, known=known)
    ever = plan.need_bytes <= device.budget_bytes
    now = plan.least_bytes <= available and slots > 0 and not state.pressed
    chosen: tuple[evict.Victim, ...] | None = None
    suggestions: tuple[str, ...] = ()
    if not ever:
        suggestions = advice.suggestions(facts, plan, device)
    elif not now:
        victims = victims_of(state)
        short_bytes, short_slots = plan.least_bytes - available, 1 - slots
        chosen = evict.choose(victims, shortfall_bytes=short_bytes, shortfall_slots=short_slots)
        if chosen is None and len(victims) >= short_slots:
            could_bytes = available + sum(victim.nbytes for victim in victims)
            suggestions = advice.suggestions(facts, plan, device, room_bytes=could_bytes)
    if in_force is None and (now or chosen):
        plan = plan.within(available + sum(victim.nbytes for victim in chosen or ()))
    return Report(
        plan=plan,
        device=device,
        fits_now=now,
        fits_ever=ever,
        available_bytes=max(0, available),
        would_evict=tuple(victim.digest for victim in chosen or ()),
        suggestions=suggestions,
    )
