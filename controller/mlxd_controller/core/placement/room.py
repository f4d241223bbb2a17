"""What memory of a device is free, what is about to be, and what can never be had. Pure.

Invariants:
- What counts is what the models on the device were promised. What they are measured to hold has
  marks of its own: see `pressure`.
- A slot is counted for each resident model, on whatever device, and a place on its own device, or
  on each of its ranks'; without a limit there is always one more.
- The room of a group is what each of its ranks has at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxd_controller.core import advice
from mlxd_controller.core.phases import Draining, Loading, Unloading
from mlxd_controller.core.state import Model, State
from mlxd_models.fit.plan import Device, Plan
from mlxd_shared.domain.errors import ModelTooLarge


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes, places of the device, and everybody's slots.

    `coming` is what models on their way out will give back.
    """

    free_bytes: int
    free_slots: int
    free_places: int
    coming_bytes: int
    coming_slots: int
    coming_places: int

    @property
    def later(self) -> Room:
        """The room once all that is on its way out has gone."""
        return Room(
            self.free_bytes + self.coming_bytes,
            self.free_slots + self.coming_slots,
            self.free_places + self.coming_places,
            0,
            0,
            0,
        )


def rooms_of(state: State) -> dict[str, Room]:
    """Return what is free on each device now and what is about to be; the slots are everybody's.

    Nothing is free on a lost device. What lives where there is no device takes a slot alone.
    """
    free_bytes = {
        device.name: 0 if device.lost else device.usable_bytes for device in state.devices
    }
    coming_bytes = dict.fromkeys(free_bytes, 0)
    coming_places = dict.fromkeys(free_bytes, 0)
    more = len(state.models) + 1
    free_slots = more if state.max_loaded is None else state.max_loaded
    free_places = {
        device.name: more if device.models_max is None else device.models_max
        for device in state.devices
    }
    coming_slots = 0
    for model in state.models.values():
        plan = model.plan
        if plan is None or not model.reserved_bytes:
            continue
        leaving = isinstance(model.phase, Draining | Unloading)
        free_slots -= 1
        coming_slots += leaving
        for home in free_bytes.keys() & {*plan.devices}:
            free_bytes[home] -= plan.need_on(home)
            free_places[home] -= 1
            if leaving:
                coming_bytes[home] += plan.need_on(home)
                coming_places[home] += 1
    return {
        name: Room(
            nbytes,
            free_slots,
            free_places[name],
            coming_bytes[name],
            coming_slots,
            coming_places[name],
        )
        for name, nbytes in free_bytes.items()
    }


def room_of(state: State, device: Device) -> Room:
    """Return the room on one device, or for each rank of a group."""
    return room_in(rooms_of(state), device)


def room_in(rooms: Mapping[str, Room], device: Device) -> Room:
    """Return the room on one device of `rooms`, or for each rank of a group."""
    if not device.members:
        return rooms[device.name]
    parts = [(rooms[name], ranks) for name, ranks in device.parts.items()]
    free_bytes = min(room.free_bytes // ranks for room, ranks in parts)
    free_places = min(room.free_places for room, _ in parts)
    later_bytes = min((room.free_bytes + room.coming_bytes) // ranks for room, ranks in parts)
    later_places = min(room.free_places + room.coming_places for room, _ in parts)
    first = parts[0][0]
    return Room(
        free_bytes,
        first.free_slots,
        free_places,
        later_bytes - free_bytes,
        first.coming_slots,
        later_places - free_places,
    )


def busy_device(state: State, device: Device) -> bool:
    """Return whether a load must wait for another load, or for the end of a worker, to be over.

    What a load takes of a GPU at its peak is in no figure until it is over, and what a worker held
    is given back by the driver only when its process is gone. Host memory is the kernel's account.
    """
    gpu = not device.on_cpu
    return gpu and any(
        isinstance(model.phase, Loading | Unloading) and state.lives_on(model, device)
        for model in state.models.values()
    )


def too_large(model: Model, plan: Plan, device: Device) -> ModelTooLarge | None:
    """Return why `plan` can never fit, whoever is evicted."""
    if plan.need_bytes <= device.budget_bytes:
        return None
    hint = " or ".join(advice.suggestions(model.facts, plan, device))
    return ModelTooLarge(
        model.name,
        plan.need_bytes,
        device.budget_bytes,
        device.reserve_bytes,
        f"it would fit with {hint}",
        *plan.term_bytes,
    )
