"""On which devices a model can live, and what each of them offers it now. Pure.

Invariants:
- A plan is for one device. A model has one for each device whose whole budget holds it; without any
  it is too large, whoever is evicted.
- Where no device that is there can hold it alone, and the number of its ranks is open, there is a
  plan for each group of as few devices as can; likewise where that number is fixed. A group is one
  home: all of its devices have room for their ranks, or none is taken.
- Nothing lives on a lost device: a model that only lost ones could hold has no room until one is
  back. That it is too large is said only of one that those could not hold either.
- A device that holds it only with less context than is useful is left out where others do better,
  lost ones too: to come back later helps whose prompt is long, a short context does not.
- What an earlier model in the queue has a claim on, on a device, is offered to no later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlxd_controller.core.phases import Queued
from mlxd_controller.core.placement.room import Room, room_in, rooms_of, too_large
from mlxd_controller.core.placement.victims import Short, short_of
from mlxd_controller.core.state import Model, State
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.groups import group_of, groups_of
from mlxd_models.fit.measured import Known
from mlxd_models.fit.plan import Device, Plan
from mlxd_models.fit.planner import is_useful, plan_load
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, ModelTooLarge, NoRoom
from mlxd_shared.domain.requests import LoadSpec


@dataclass(frozen=True, slots=True)
class Line:
    """What earlier models in the queue have a claim on, by device, and the position after them."""

    claimed_bytes: Mapping[str, int]
    claimed_places: Mapping[str, int]
    claimed_slots: int
    awaited: frozenset[str]
    """Devices on which no later load begins: a group waits there until all of it is at rest."""
    position: int


@dataclass(frozen=True, slots=True)
class Home:
    """One device, or group, for one model: what is free there for it, or a rank, and what it lacks.

    `short` is negative, or 0, where nothing is lacking; `coming` is the same once all that is on
    its way out has gone.
    """

    plan: Plan
    device: Device
    free_bytes: int
    short: Short
    coming: Short

    @property
    def fits(self) -> bool:
        """Whether the model fits as things are."""
        return self.short.nothing

    @property
    def comes(self) -> bool:
        """Whether it will without anybody else's leaving."""
        return self.coming.nothing


def plans_for(
    model: Model, spec: LoadSpec, devices: tuple[Device, ...]
) -> tuple[Plan, ...] | InvalidRequest | ModelTooLarge | NoRoom:
    """Return a plan for each device that can hold the model, at least one, in the devices' order.

    Or why there is none: by the device that comes closest. Raises Undescribed as `plans_of`.
    """
    try:
        plans = plans_of(model.facts, spec, devices, known=model.measured)
    except InvalidRequest as refused:
        return refused
    by_name = {device.name: device for device in devices}
    closest = group_of([by_name[name] for name in plans[0].devices])
    error = too_large(model, plans[0], closest)
    if error is None and closest.lost:
        homes = {name for plan in plans for name in plan.devices}
        return _out_of_reach(model, plans[0], [one for one in devices if one.name in homes])
    return error or plans


def _out_of_reach(model: Model, plan: Plan, lost: list[Device]) -> NoRoom:
    """Return what to tell those who want a model that only these lost devices could hold."""
    plan = plan.within(0)
    return NoRoom(
        model.name,
        plan.need_bytes,
        0,
        config.NO_ROOM_RETRY_AFTER_S,
        0,
        lost[0].reserve_bytes,
        *plan.term_bytes,
        lost=", ".join(map(_name, lost)),
    )


def _name(device: Device) -> str:
    """Return the name of a device, with those of the workers that would have to be there again."""
    if not device.workers:
        return device.name
    return f"{device.name} ({', '.join(device.workers)})"


def plans_of(
    facts: ModelFacts,
    spec: LoadSpec,
    devices: tuple[Device, ...],
    *,
    known: tuple[Known, ...] = (),
) -> tuple[Plan, ...]:
    """Return a plan for each device, or group, that can hold such a model; else for the largest.

    For lost devices where all such are lost. known: what was measured of the model before.

    Raises:
        InvalidRequest: so many ranks as are asked for cannot share the model with its weights in
            that form, or there are not so many devices.
        Undescribed: what ranks have of the model is needed, and not described yet.
    """
    if spec.ranks is not None:
        problem = facts.division_problem(spec.ranks, spec.weights)
        if problem is not None:
            raise InvalidRequest.of("options.ranks", problem)
    lost: tuple[Plan, ...] = ()
    short: tuple[Plan, ...] = ()
    largest: tuple[Plan, ...] = ()
    for ranks in config.RANKS_SERVED if spec.ranks is None else (spec.ranks,):
        places = groups_of(devices, ranks)
        if spec.ranks is None and ranks > 1:  # on one memory more ranks hold no more
            places = tuple(place for place in places if not place.on_cpu)
        # Asked last: what ranks have is described only where there are devices for them.
        if not places or facts.division_problem(ranks, spec.weights) is not None:
            continue
        planned = [(plan_load(facts, spec, place, known=known), place) for place in places]
        able = [pair for pair in planned if pair[0].need_bytes <= pair[1].budget_bytes]
        useful = [pair for pair in able if is_useful(pair[0], facts, spec)]
        present = tuple(plan for plan, place in useful if not place.lost)
        if present:
            return present
        lost = lost or tuple(plan for plan, _ in useful)
        if not useful and not short:  # more ranks may have a longer context
            there = [pair for pair in able if not pair[1].lost]
            short = tuple(plan for plan, _ in there or able)
        largest = (max(planned, key=lambda pair: pair[1].budget_bytes)[0],)
    if not largest:
        problem = f"{spec.ranks}: no machine here has so many devices of one kind for them"
        raise InvalidRequest.of("options.ranks", problem)
    return lost or short or largest


def homes_of(state: State, queued: Queued, line: Line) -> list[Home]:
    """Return what the devices offer a queued model, the one with most room first.

    Devices above their marks are left out, unless all are: there no load begins.
    """
    rooms = rooms_of(state)
    homes = [_home(state, plan, rooms, line) for plan in queued.plans]
    open_ = [home for home in homes if not state.is_pressed(home.device)]
    return sorted(open_ or homes, key=lambda home: home.short.nbytes)


def _home(state: State, plan: Plan, rooms: Mapping[str, Room], line: Line) -> Home:
    device = state.device_named(plan.device)
    assert device is not None, "a queued model has plans for the devices there are"
    left = {name: _subtract_claims(rooms[name], name, line) for name in device.parts}
    short = short_of(left, device, plan)
    coming = short_of({name: room.later for name, room in left.items()}, device, plan)
    return Home(plan, device, room_in(left, device).free_bytes, short, coming)


def _subtract_claims(room: Room, name: str, line: Line) -> Room:
    return replace(
        room,
        free_bytes=room.free_bytes - line.claimed_bytes.get(name, 0),
        free_slots=room.free_slots - line.claimed_slots,
        free_places=room.free_places - line.claimed_places.get(name, 0),
    )
