"""What memory is free, what is about to be, and what can never be had. Pure.

Invariants:
- What counts is what models were promised. What they are measured to hold has marks of its own: see
  `pressure`.
- A slot is counted for each resident model; without a limit there is always one more.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_controller.core import advice, fit
from mlxd_controller.core.state import Model, Phase, State
from mlxd_shared.errors import ModelTooLarge


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes and model slots. `coming` is what models on their way out will give back."""

    free_bytes: int
    free_slots: int
    coming_bytes: int
    coming_slots: int


def room_of(state: State) -> Room:
    """Return what is free now and what is about to be."""
    free_bytes = state.device.usable_bytes
    free_slots = len(state.models) + 1 if state.max_loaded is None else state.max_loaded
    coming_bytes = coming_slots = 0
    for model in state.models.values():
        nbytes = model.reserved_bytes
        if not nbytes:
            continue
        free_bytes -= nbytes
        free_slots -= 1
        if model.phase is Phase.DRAINING or model.phase is Phase.UNLOADING:
            coming_bytes += nbytes
            coming_slots += 1
    return Room(free_bytes, free_slots, coming_bytes, coming_slots)


def busy_device(state: State) -> bool:
    """Return whether a load must wait for another load, or for the end of a worker, to be over.

    What a load takes of a GPU at its peak is in no figure until it is over, and what a worker held
    is given back by the driver only when its process is gone. Host memory is the kernel's account.
    """
    moving = (Phase.LOADING, Phase.UNLOADING)
    gpu = state.device.kind != "cpu"
    return gpu and any(model.phase in moving for model in state.models.values())


def too_large(model: Model, plan: fit.Plan, device: fit.Device) -> ModelTooLarge | None:
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
