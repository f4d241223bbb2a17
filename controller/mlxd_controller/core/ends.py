"""How a model's worker comes to its end: as ordered, by its death, or with its machine. Pure.

Invariants:
- Nobody who waits for the model is forgotten: they wait for its next worker, or are refused.
- A death is the model's failure, and too many of them make the next start wait. The loss of its
  machine is not.
"""

from __future__ import annotations

from mlxd_controller.core import phases
from mlxd_controller.core.demand import Demand
from mlxd_controller.core.placement.queueing import enqueue
from mlxd_controller.core.state import Model
from mlxd_controller.core.turn import Turn
from mlxd_shared.domain.errors import MlxdError, WorkerLost


def end_unload(turn: Turn, model: Model, unloading: phases.Unloading) -> None:
    """Note the end of a worker that was told to stop."""
    ended = turn.end(model, phases.UNLOADED)
    if unloading.demand.stands:
        enqueue(turn, ended, unloading.demand)


def replace_dead(turn: Turn, model: Model, error: MlxdError) -> None:
    """Note the death of a worker; those who waited because it was held wait for its next one."""
    waiters = model.waiters
    model = turn.fail(model, error)
    if waiters:
        enqueue(turn, model, Demand(waiters))


def end_lost(turn: Turn, model: Model, machine: str) -> None:
    """Note that a model's worker is out of reach with its machine, without a word to it."""
    match model.phase:
        case phases.Loading() | phases.Ready():
            demand = phases.demand_of(model.phase)
            error = WorkerLost(model.name, cause=f"its machine is lost: {machine}")
            model = turn.end(model, phases.Failed(error))
            if demand.stands:
                enqueue(turn, model, Demand(demand.waiters, demand.wanted))
        case phases.Draining():
            turn.end(model, phases.UNLOADED)
        case phases.Unloading() as unloading:
            end_unload(turn, model, unloading)
        case _:
            pass
