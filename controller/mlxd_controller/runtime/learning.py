"""What workers say that they take, for the scheduler to reckon with.

Invariants:
- Only a worker that has weights and figures of them says anything.
- Beside arrays a process is measured only where these are part of its resident set: on a CPU.
- Small changes are no news: the scheduler is told of what has grown by `NEWS_BYTES`.
"""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core.phases import Ready
from mlxd_controller.core.state import Model
from mlxd_models.fit.measured import Figures
from mlxd_shared.config import MIB
from mlxd_shared.domain.devices import DeviceKind, kind_of
from mlxd_shared.domain.figures import WorkerFigures

WEIGHTS_ACCOUNT = "weights"
NEWS_BYTES = MIB


def figures_of(worker: WorkerFigures) -> Figures | None:
    """Return what a worker with a model takes; None where it does not say."""
    memory = worker.memory
    weights = sum(a.nbytes for a in memory.accounts if a.name == WEIGHTS_ACCOUNT)
    if not weights:
        return None
    on_cpu = kind_of(worker.backend) is DeviceKind.CPU
    return Figures(
        weights=weights,
        peak=memory.mlx_peak_nbytes,
        process=max(memory.resident_nbytes - memory.mlx_nbytes, 0) if on_cpu else 0,
    )


def is_news(before: Figures | None, now: Figures) -> bool:
    """Return whether the scheduler should hear of `now`, after it has heard `before`."""
    if before is None:
        return True
    grown = max(now.peak - before.peak, now.process - before.process)
    return grown >= NEWS_BYTES or now.weights != before.weights


def same_but_measured(former: Model | None, model: Model) -> bool:
    """Return whether nothing that anybody watches has changed: only what a model takes."""
    if former is None or former.measured is model.measured:
        return False
    if not isinstance(former.phase, Ready) or not isinstance(model.phase, Ready):
        return False
    measured = replace(former.phase, plan=model.phase.plan)
    return replace(former, phase=measured, measured=model.measured) == model
