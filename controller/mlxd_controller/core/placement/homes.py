"""On which devices a model can live, and what each of them offers it now. Pure.

Invariants:
- A plan is for one device. A model has one for each device whose whole budget holds it; without any
  it is too large, whoever is evicted.
- Nothing lives on a lost device: a model that only lost ones could hold has no room until one is
  back. That it is too large is said only of one that those could not hold either.
- A device that holds it only with less context than is useful is left out where others do better,
  lost ones too: to come back later helps whose prompt is long, a short context does not.
- What an earlier model in the queue has a claim on, on a device, is offered to no later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxd_controller.core.phases import Queued
from mlxd_controller.core.placement.room import Room, rooms_of, too_large
from mlxd_controller.core.placement.victims import Short
from mlxd_controller.core.state import Model, State
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.measured import Known
from mlxd_models.fit.plan import Device, Plan
from mlxd_models.fit.planner import is_useful, plan_load
from mlxd_shared import config
from mlxd_shared.domain.errors import ModelTooLarge, NoRoom
from mlxd_shared.domain.requests import LoadSpec


@dataclass(frozen=True, slots=True)
class Line:
    """What earlier models in the queue have a claim on, by device, and the position after them."""

    claimed_bytes: Mapping[str, int]
    claimed_places: Mapping[str, int]
    position: int

    @property
    def claimed_slots(self) -> int:
        """Every claim is on a slot as well."""
        return sum(self.claimed_places.values())


@dataclass(frozen=True, slots=True)
class Home:
    """One device for one model: what is free on it for the model, and what it lacks.

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
) -> tuple[Plan, ...] | ModelTooLarge | NoRoom:
    """Return a plan for each device that can hold the model, at least one, in the devices' order.

    Or why there is none: by the device that comes closest.
    """
    plans = plans_of(model.facts, spec, devices, known=model.measured)
    closest = next(device for device in devices if device.name == plans[0].device)
    error = too_large(model, plans[0], closest)
    if error is None and closest.lost:
        homes = {plan.device for plan in plans}
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
    """Return a plan for each device that can hold such a model; without any, for the largest.

    For lost devices where all such are lost. known: what was measured of the model before.
    """
    planned = [(plan_load(facts, spec, device, known=known), device) for device in devices]
    able = [pair for pair in planned if pair[0].need_bytes <= pair[1].budget_bytes]
    if not able:
        return (max(planned, key=lambda pair: pair[1].budget_bytes)[0],)
    good = [pair for pair in able if is_useful(pair[0], facts, spec)] or able
    present = [pair for pair in good if not pair[1].lost]
    return tuple(plan for plan, _ in present or good)


def homes_of(state: State, queued: Queued, line: Line) -> list[Home]:
    """Return what the devices offer a queued model, the one with most room first.

    Devices above their marks are left out, unless all are: there no load begins.
    """
    rooms = rooms_of(state)
    homes = [_home(state, plan, rooms, line) for plan in queued.plans]
    open_ = [home for home in homes if home.device.name not in state.pressed]
    return sorted(open_ or homes, key=lambda home: home.short.nbytes)


def _home(state: State, plan: Plan, rooms: Mapping[str, Room], line: Line) -> Home:
    device = state.device_named(plan.device)
    assert device is not None, "a queued model has plans for the devices there are"
    room = rooms[device.name]
    free_bytes = room.free_bytes - line.claimed_bytes.get(device.name, 0)
    short = Short(
        device,
        plan.least_bytes - free_bytes,
        1 + line.claimed_slots - room.free_slots,
        1 + line.claimed_places.get(device.name, 0) - room.free_places,
    )
    coming = Short(
        device,
        short.nbytes - room.coming_bytes,
        short.slots - room.coming_slots,
        short.places - room.coming_places,
    )
    return Home(plan, device, free_bytes, short, coming)
