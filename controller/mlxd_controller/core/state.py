"""The controller's knowledge: which models live where, who uses them, who waits. Immutable.

Invariants (held by `schedule`, proved by tests):
- A model is in exactly one phase, which says what there is of it: see `phases`.
- A ticket is in one place at a time: a lease, a waiter or an unloader of one model.
- Each launch has a serial number of its own; what a former worker reports is not believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mlxd_controller.core import phases
from mlxd_controller.core.demand import Fixed, Waiter
from mlxd_controller.core.placement.reuse import NEVER_USED, Usage
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.groups import group_of, split_group
from mlxd_models.fit.measured import Known
from mlxd_models.fit.plan import Device, Plan
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import LoadSpec

NOTHING_FIXED = LoadSpec()


@dataclass(frozen=True, slots=True)
class Model:
    """One model, by digest. `path` and `facts` are as of the last time it was asked for.

    What is only true in one phase is in `phase`; all else outlives the loads.
    """

    digest: str
    name: str
    path: str
    facts: ModelFacts
    keep_alive_s: float
    phase: phases.Phase = phases.UNLOADED
    spec: LoadSpec = NOTHING_FIXED
    configured: LoadSpec = NOTHING_FIXED
    """What the configuration fixes for its loads, before anybody else does."""
    pinned: bool = False
    last_used_s: float = 0.0
    measured: tuple[Known, ...] = ()
    """What its loads were measured to take."""
    usage: Usage = NEVER_USED
    """How often it was asked for."""
    load_s: float = 0.0
    """How long its last complete load took."""
    failures: int = 0
    """Workers in a row that failed to load it, or died soon after."""
    retry_s: float | None = None
    """No worker is started before, after failures in a row."""
    hold_again_s: float | None = None
    """Not held again before."""

    @property
    def fixed(self) -> Fixed:
        """What is fixed for it now."""
        return Fixed(self.spec, self.pinned, self.keep_alive_s)

    @property
    def plan(self) -> Plan | None:
        """How it lives, and on which device; in the queue, how it would on the first of them."""
        return None if isinstance(self.phase, phases.Cold) else self.phase.plan

    @property
    def worker(self) -> int | None:
        """The number of its worker, where it has one."""
        return self.phase.worker if isinstance(self.phase, phases.Resident) else None

    @property
    def reserved_bytes(self) -> int:
        """What it holds, or is promised while it loads, with all its ranks."""
        plan = self.phase.plan if isinstance(self.phase, phases.Resident) else None
        return 0 if plan is None else plan.need_bytes * plan.ranks

    def reserved_on(self, device: str) -> int:
        """Return what of that is on the device of this name."""
        return self.phase.plan.need_on(device) if isinstance(self.phase, phases.Resident) else 0

    @property
    def leases(self) -> frozenset[str]:
        """The requests that use it."""
        return (
            self.phase.leases
            if isinstance(self.phase, phases.Ready | phases.Draining)
            else frozenset()
        )

    @property
    def waiters(self) -> tuple[Waiter, ...]:
        """The requests that wait until it is ready."""
        return phases.demand_of(self.phase).waiters

    @property
    def unloaders(self) -> tuple[str, ...]:
        """The requests that wait until it is gone."""
        return (
            self.phase.unloaders
            if isinstance(self.phase, phases.Draining | phases.Unloading)
            else ()
        )

    @property
    def error(self) -> MlxdError | None:
        """Why its last worker failed; None once the next one is started."""
        return self.phase.error if isinstance(self.phase, phases.Failed | phases.Queued) else None

    @property
    def idle(self) -> bool:
        """Ready, and nobody uses it."""
        return isinstance(self.phase, phases.Ready) and not self.phase.leases

    @property
    def held(self) -> bool:
        """Whether new requests wait though it is ready."""
        return isinstance(self.phase, phases.Ready) and self.phase.hold is not None

    @property
    def expires_s(self) -> float:
        """When it is unloaded unless somebody uses it; infinite: never."""
        return self.last_used_s + self.keep_alive_s if self.idle else math.inf


@dataclass(frozen=True, slots=True)
class State:
    """Everything that decisions depend on. `models` is never changed in place."""

    devices: tuple[Device, ...]
    keep_alive_s: float = config.KEEP_ALIVE_DEFAULT_S
    max_loaded: int | None = None
    age_min_s: float = config.EVICTION_AGE_MIN_S
    look_again_s: float = math.inf
    """When time alone lets more be evicted, or held, for those who wait for models in use."""
    models: Mapping[str, Model] = field(default_factory=dict)
    arrays: Mapping[int, int] = field(default_factory=dict)
    """What workers last said that their arrays hold, by their numbers; of ranks each holds that."""
    prefix_reload_s: Mapping[int, float] = field(default_factory=dict)
    """What workers last said that prompts would cost again after a reload, by their numbers."""
    pressed: frozenset[str] = frozenset()
    """Devices above the hard mark, and not below the soft one since; see `pressure`."""
    relieve_again_s: float = math.inf
    """When time alone lets more be done about that."""
    refused: int = 0
    """How many found no room to wait since queues were half empty: they come back apart."""
    next_worker: int = 1
    next_place: int = 1
    stopping: bool = False

    def device_named(self, name: str) -> Device | None:
        """Return the device, or the group, with this name, lost or not, if there is one."""
        known = {device.name: device for device in self.devices}
        members = (name,) if name in known else split_group(name)
        if not all(member in known for member in members):
            return None
        return group_of([known[member] for member in members])

    def home_of(self, model: Model) -> str:
        """Return the name of the device, or group, on which a model lives, or is to; "": none."""
        plan = model.plan
        return "" if plan is None else plan.device

    def lives_on(self, model: Model, device: Device) -> bool:
        """Return whether a model lives on `device`, or on one of a group's, or is to.

        There need be no such device any more: then it counts on none.
        """
        plan = model.plan
        return plan is not None and not device.parts.keys().isdisjoint(plan.devices)

    def reserved_on(self, device: Device, models: Iterable[Model] | None = None) -> int:
        """Return what `models` hold or are promised on a device; None: all models."""
        of = self.models.values() if models is None else models
        return sum(model.reserved_on(device.name) for model in of)

    def is_pressed(self, device: Device) -> bool:
        """Return whether a device, or one of a group's, is above its marks."""
        return not self.pressed.isdisjoint(device.parts)

    def prompts_again_s(self, model: Model) -> float:
        """Return what a model's prompts would cost its next request after a reload, in seconds."""
        worker = model.worker
        return 0.0 if worker is None else self.prefix_reload_s.get(worker, 0.0)

    def held_on(self, device: Device) -> int:
        """Return what all workers were measured to hold on a device, or say that they do.

        On a lost one nothing: whatever was measured last, its workers have ended.
        """
        if device.held_bytes and not device.lost:
            return device.held_bytes
        plans = {m.worker: m.plan for m in self.models.values() if self.lives_on(m, device)}
        return sum(
            nbytes * plan.devices.count(device.name)
            for worker, nbytes in self.arrays.items()
            if (plan := plans.get(worker)) is not None
        )

    def excess_on(self, device: Device) -> int:
        """Return what workers hold above a device's soft mark, which is what is usable."""
        return self.held_on(device) - device.usable_bytes

    @property
    def waiters(self) -> int:
        """How many requests wait for a model."""
        return sum(len(model.waiters) for model in self.models.values())

    @property
    def crowded(self) -> bool:
        """Whether more than half of a queue is taken, of those who wait for loads or an unload."""
        most = max((len(model.unloaders) for model in self.models.values()), default=0)
        return self.waiters > config.LOAD_WAITERS_MAX // 2 or most > config.UNLOAD_WAITERS_MAX // 2

    def by_worker(self, worker: int) -> Model | None:
        """Return the model that this launch serves now."""
        return next((m for m in self.models.values() if m.worker == worker), None)

    def queue(self) -> list[tuple[Model, phases.Queued]]:
        """Return the models that wait for memory, the earliest place first."""
        models = self.models.values()
        queued = [(m, m.phase) for m in models if isinstance(m.phase, phases.Queued)]
        return sorted(queued, key=lambda pair: pair[1].place)

    def ready(self) -> list[tuple[Model, phases.Ready]]:
        """Return the models that are ready, held or not."""
        return [(m, m.phase) for m in self.models.values() if isinstance(m.phase, phases.Ready)]

    def with_model(self, model: Model) -> State:
        """Return the state with `model` in place of its former self."""
        return replace(self, models={**self.models, model.digest: model})


def next_wake_s(state: State) -> float:
    """Return when time alone changes something; infinite: never."""
    times = [state.relieve_again_s]
    for model in state.models.values():
        times.append(model.expires_s)
        match model.phase:
            case phases.Draining(until_s=until_s) | phases.Ready(hold=phases.Hold(until_s=until_s)):
                times.append(until_s)
            case phases.Queued(backing_off=True) if model.retry_s is not None:
                times.append(model.retry_s)
            case phases.Queued(stuck=True) as queued:
                times += [queued.gives_up_s, state.look_again_s]
            case _:
                pass
    return min(times)
