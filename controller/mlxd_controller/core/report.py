"""What a load would do, without doing it: the answer to LoadModel.validate_only. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlxd_controller.core import advice, phases
from mlxd_controller.core.options import fill_in
from mlxd_controller.core.placement import evict
from mlxd_controller.core.placement.homes import plans_of
from mlxd_controller.core.placement.room import room_of
from mlxd_controller.core.placement.victims import Short, candidates, choose
from mlxd_controller.core.state import Model, State
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.plan import Device, Plan
from mlxd_shared.domain.requests import LoadSpec


@dataclass(frozen=True, slots=True)
class Absence:
    """What a model that is evicted costs whoever asks for it next, in seconds."""

    digest: str
    load_s: float
    prompts_s: float
    """To compute, or read from disk, what memory has of prompts."""


@dataclass(frozen=True, slots=True)
class Report:
    """A plan and how it meets the memory there is. `would_evict` are digests.

    `absences` are what that would cost, in the same order.
    """

    plan: Plan
    device: Device
    fits_now: bool
    fits_ever: bool
    available_bytes: int
    would_evict: tuple[str, ...]
    absences: tuple[Absence, ...]
    suggestions: tuple[str, ...]


def report(state: State, digest: str, facts: ModelFacts, spec: LoadSpec) -> Report:
    """Return what a load of this model with `spec` would need, evict and come up against.

    On the device where it would go. A resident model is reckoned as if its own memory were free; by
    the plan in force while it keeps that, which `options.conflict` says of a `spec`.
    """
    model = state.models.get(digest)
    if model is not None:
        spec = fill_in(spec, model.spec)
    match None if model is None else model.phase:
        case phases.Queued(plans=plans):
            in_force = True
        case phases.Loading(plan=plan) | phases.Ready(plan=plan) if (
            state.device_named(plan.device) is not None
        ):
            in_force, plans = True, (plan,)
        case _:
            in_force = False
            known = () if model is None else model.measured
            plans = plans_of(facts, spec, state.devices, known=known)
    looks = [_look(state, model, plan) for plan in plans]
    best = min(looks, key=lambda look: look.rank)
    plan = best.plan
    if not in_force and (best.fits_now or best.victims):
        freed = sum(victim.nbytes for victim in best.victims or ())
        plan = plan.within(best.available_bytes + freed)
    return Report(
        plan=plan,
        device=best.device,
        fits_now=best.fits_now,
        fits_ever=best.fits_ever,
        available_bytes=max(0, best.available_bytes),
        would_evict=tuple(victim.digest for victim in best.victims or ()),
        absences=tuple(_absence(state, victim.digest) for victim in best.victims or ()),
        suggestions=_suggestions(facts, best),
    )


def _absence(state: State, digest: str) -> Absence:
    model = state.models[digest]
    return Absence(digest, model.load_s, state.prompts_again_s(model))


@dataclass(frozen=True, slots=True)
class _Look:
    """What one device would have for the model; `victims` None where no eviction makes room."""

    plan: Plan
    device: Device
    pressed: bool
    available_bytes: int
    fits_now: bool
    fits_ever: bool
    victims: tuple[evict.Victim, ...] | None
    could_bytes: int | None
    """What there would be if all went who may, where even that is too little."""

    @property
    def rank(self) -> tuple[Any, ...]:
        """By what the best is found, in the order in which `placing` does."""
        short_bytes = self.plan.least_bytes - self.available_bytes
        dearness = evict.dearness(self.victims or ())
        return (self.pressed, not self.fits_now, self.victims is None, dearness, short_bytes)


def _look(state: State, model: Model | None, plan: Plan) -> _Look:
    device = state.device_named(plan.device)
    assert device is not None, "planned for the devices there are"
    pressed = device.name in state.pressed
    room = room_of(state, device)
    available, slots, places = room.free_bytes, room.free_slots, room.free_places
    if model is not None and isinstance(model.phase, phases.Resident):
        slots += 1
        if state.lives_on(model, device):
            available += model.reserved_bytes
            places += 1
    ever = plan.need_bytes <= device.budget_bytes
    now = plan.least_bytes <= available and min(slots, places) > 0 and not pressed
    victims: tuple[evict.Victim, ...] | None = None
    could_bytes: int | None = None
    if ever and not now:
        short = Short(device, plan.least_bytes - available, 1 - slots, 1 - places)
        offered = candidates(state, math.inf)  # the young ones too, which will be old enough
        victims = choose(state, offered, short)
        if victims is None and _frees_enough(state, offered, short):
            could_bytes = available + state.reserved_on(device, offered)
    return _Look(plan, device, pressed, available, now, ever, victims, could_bytes)


def _frees_enough(state: State, offered: list[Model], short: Short) -> bool:
    """Return whether slots and places, if not bytes, are there once these have gone."""
    here = sum(state.lives_on(model, short.device) for model in offered)
    return len(offered) >= short.slots and here >= short.places


def _suggestions(facts: ModelFacts, look: _Look) -> tuple[str, ...]:
    """Return what would make it fit: ever, or beside those who stay."""
    if not look.fits_ever:
        return advice.suggestions(facts, look.plan, look.device)
    if look.could_bytes is None:
        return ()
    return advice.suggestions(facts, look.plan, look.device, room_bytes=look.could_bytes)
