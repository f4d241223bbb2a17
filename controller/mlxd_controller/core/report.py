"""What a load would do, without doing it: the answer to LoadModel.validate_only. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxd_controller.core import advice, phases
from mlxd_controller.core.options import fill_in
from mlxd_controller.core.placement import evict
from mlxd_controller.core.placement.homes import plans_of
from mlxd_controller.core.placement.room import Room, room_in, rooms_of
from mlxd_controller.core.placement.victims import Short, candidates, choose, short_of
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
    """A plan and how it meets the memory there is: each rank's. `would_evict` are digests.

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

    Raises:
        InvalidRequest: there are not so many devices as ranks are asked for.
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
        plan = plan.within(best.available_bytes + best.freed_bytes)
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
    freed_bytes: int
    """How much more there is once the victims have gone."""

    @property
    def rank(self) -> tuple[Any, ...]:
        """By what the best is found, in the order in which `placing` does."""
        short_bytes = self.plan.least_bytes - self.available_bytes
        dearness = evict.dearness(self.victims or ())
        return (self.pressed, not self.fits_now, self.victims is None, dearness, short_bytes)


def _look(state: State, model: Model | None, plan: Plan) -> _Look:
    device = state.device_named(plan.device)
    assert device is not None, "planned for the devices there are"
    pressed = state.is_pressed(device)
    others = state
    if model is not None and isinstance(model.phase, phases.Resident):
        others = state.with_model(replace(model, phase=phases.UNLOADED))
    rooms = rooms_of(others)
    room = room_in(rooms, device)
    available, slots, places = room.free_bytes, room.free_slots, room.free_places
    ever = plan.need_bytes <= device.budget_bytes
    now = plan.least_bytes <= available and min(slots, places) > 0 and not pressed
    victims: tuple[evict.Victim, ...] | None = None
    could_bytes: int | None = None
    if ever and not now:
        short = short_of({name: rooms[name] for name in device.parts}, device, plan)
        offered = candidates(others, math.inf)  # the young ones too, which will be old enough
        victims = choose(state, offered, short)
        if victims is None and _frees_enough(offered, short):
            could_bytes = _left_by(offered, rooms, device)
    going = [state.models[victim.digest] for victim in victims or ()]
    freed = _left_by(going, rooms, device) - available
    return _Look(plan, device, pressed, available, now, ever, victims, could_bytes, freed)


def _left_by(going: list[Model], rooms: Mapping[str, Room], device: Device) -> int:
    """Return what a rank has once these have gone."""
    return min(
        (rooms[name].free_bytes + sum(model.reserved_on(name) for model in going)) // ranks
        for name, ranks in device.parts.items()
    )


def _frees_enough(offered: list[Model], short: Short) -> bool:
    """Return whether slots and places, if not bytes, are there once these have gone."""
    return len(offered) >= short.slots and all(
        sum(model.reserved_on(lack.device) > 0 for model in offered) >= lack.places
        for lack in short.each
    )


def _suggestions(facts: ModelFacts, look: _Look) -> tuple[str, ...]:
    """Return what would make it fit: ever, or beside those who stay."""
    if not look.fits_ever:
        return advice.suggestions(facts, look.plan, look.device)
    if look.could_bytes is None:
        return ()
    return advice.suggestions(facts, look.plan, look.device, room_bytes=look.could_bytes)
