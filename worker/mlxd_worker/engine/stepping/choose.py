"""Which stepper a loaded model gets: chosen once, by what the model and its caches can do.

Invariants:
- Nothing is asked again while rows are stepped: a model, its caches and its device do not change.
- Guessing stands on the stepper that plain decoding has; that one knows nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.speculation.speculator import SpeculationCounts, Speculator
from mlxd_worker.engine.stepping.ahead import Ahead, Lead
from mlxd_worker.engine.stepping.base import Stepper
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.engine.stepping.joined import Joined
from mlxd_worker.engine.stepping.plain import Plain
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.models.base import Capabilities, JoiningPasses, Model, Passes


@dataclass(frozen=True, slots=True)
class Way:
    """How the rows of one model and its caches are stepped."""

    lead: Lead | None
    """How far steps run ahead; None where each is read before the next is prepared."""
    joins: bool
    """Whether a step's pass takes prompts' tokens along."""
    guesses: bool
    """Whether rows may guess."""


def way_of(able: Capabilities, caches: RowCaches) -> Way:
    """Return how rows of `caches` are stepped best by such a model, of what is switched on."""
    lead = None
    if able.overlaps_steps:
        lead = Lead.DISPATCHED
    elif able.on_cpu and able.stays_lazy and caches.standard:
        lead = Lead.MADE_UP
    # On a CPU, where its products read the weights once for all. Elsewhere shapes must be few.
    joins = able.joins_passes and caches.standard and not caches.bounded_shapes
    return Way(
        lead if SWITCHES.is_on(FastPath.RUN_AHEAD) else None,
        joins=joins and SWITCHES.is_on(FastPath.JOINED_PASSES),
        # A recurrent state never goes back to before a wrong guess.
        guesses=Kind.RECURRENT not in caches.contents.layers,
    )


def compile_steps(model: Model, caches: RowCaches, kind: DeviceKind) -> CompiledModel | None:
    """Return the model with its decode step as one function, where that pays; None elsewhere."""
    pays = kind is DeviceKind.CUDA and model.capabilities.compiles
    return CompiledModel(model, caches) if pays and SWITCHES.is_on(FastPath.COMPILED_STEP) else None


def writes_in_place(model: Model, kind: DeviceKind) -> bool:
    """Tell whether all passes of `compile_steps`'s model will write standard caches in place."""
    compiles = kind is DeviceKind.CUDA and model.capabilities.compiles
    able = compiles and model.capabilities.decodes_in_place
    return able and SWITCHES.is_on(FastPath.COMPILED_STEP)


def choose(
    model: Passes,
    caches: RowCaches,
    *,
    clock: Callable[[], float] = time.monotonic,
    depth_default: int = 0,
    counts: SpeculationCounts | None = None,
) -> Stepper:
    """Return what steps the rows of `caches`, which must hold none yet.

    depth_default: the most tokens that a row guesses whose request leaves it open; 0 for none.
    counts: learns what guessing does.
    """
    way = way_of(model.capabilities, caches)
    plain = main_road(model, caches, way)
    if not way.guesses:
        return plain
    return Speculator(model, caches, plain, clock=clock, depth_default=depth_default, counts=counts)


def main_road(model: Passes, caches: RowCaches, way: Way) -> Stepper:
    """Return what steps rows that guess nothing."""
    plain: Stepper = Plain(model, caches)
    if way.lead is not None:
        plain = Ahead(model, caches, lead=way.lead)
    # A model that says its passes join has them.
    return Joined(cast("JoiningPasses", model), caches, plain) if way.joins else plain
