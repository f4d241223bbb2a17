"""The controller's knowledge: which models live where, who uses them, who waits. Immutable.

Invariants (held by `schedule`, proved by tests):
- A model is in exactly one phase. It has a worker in LOADING, READY, DRAINING and UNLOADING, and
  reserves its plan's bytes exactly then; it has a plan in these and in QUEUED. In READY the plan is
  corrected by what was measured.
- Leases exist in READY and DRAINING only; waiters in QUEUED, LOADING and UNLOADING only, and in
  READY while the model is held.
- A ticket is in one place at a time: a lease, a waiter or an unloader of one model.
- Each launch has a serial number of its own; what a former worker reports is not believed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlxd_controller.core.fit import Device, ModelFacts, Plan
from mlxd_controller.core.measured import Known
from mlxd_controller.core.reuse import NEVER_USED, Usage
from mlxd_shared import config
from mlxd_shared.errors import MlxdError
from mlxd_shared.requests import LoadSpec

NOTHING_FIXED = LoadSpec()


class Phase(enum.Enum):
    """The life of a model; see types.proto ModelState."""

    UNLOADED = "unloaded"
    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"


RESIDENT = frozenset({Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.UNLOADING})
"""Phases in which a worker process holds memory."""

COLD = frozenset({Phase.UNLOADED, Phase.FAILED})
"""Phases in which nothing of a model is loaded, or waits to be."""

JOINABLE = frozenset({Phase.QUEUED, Phase.LOADING, Phase.READY})
"""Phases in which a load joins the plan there is; after the others it makes a new one."""


class Want(enum.Enum):
    """What a waiter waits for."""

    LEASE = "lease"
    LOAD = "load"


class StopReason(enum.Enum):
    """Why a worker is stopped."""

    ROOM = "room"
    EXPIRED = "expired"
    ASKED = "asked"
    PRESSURE = "pressure"
    SHUTDOWN = "shutdown"
    SURPLUS = "surplus"
    """A former controller started it, and there is no room for it."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits until its model is ready."""

    ticket: str
    want: Want
    since_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load has come."""

    stage: str = ""
    bytes_read: int = 0
    bytes_total: int = 0

    @property
    def fraction(self) -> float:
        """Between 0 and 1; 0 while the total is unknown."""
        return self.bytes_read / self.bytes_total if self.bytes_total else 0.0


@dataclass(frozen=True, slots=True)
class Fixed:
    """What operators and requests fixed for a model, beyond one load."""

    spec: LoadSpec
    pinned: bool
    keep_alive_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """One model, by digest. `path` and `facts` are as of the last time it was asked for."""

    digest: str
    name: str
    path: str
    facts: ModelFacts
    keep_alive_s: float
    phase: Phase = Phase.UNLOADED
    spec: LoadSpec = NOTHING_FIXED
    pinned: bool = False
    before: Fixed | None = None
    """What was fixed before a load that has not begun; in force again if that is refused."""
    plan: Plan | None = None
    """How it lives, and on which device. In the queue: the first of `plans`."""
    plans: tuple[Plan, ...] = ()
    """In the queue: how it would live on each device that can hold it."""
    worker: int = 0
    leases: frozenset[str] = frozenset()
    waiters: tuple[Waiter, ...] = ()
    unloaders: tuple[str, ...] = ()
    streams_aborted: int = 0
    wanted: bool = False
    """A LoadModel asked for it: the load goes on though nobody waits."""
    last_used_s: float = 0.0
    measured: tuple[Known, ...] = ()
    """What its loads were measured to take; outlives them."""
    usage: Usage = NEVER_USED
    """How often it was asked for; outlives its loads."""
    load_began_s: float = 0.0
    load_s: float = 0.0
    """How long its last complete load took."""
    queued_at: int = 0
    """Place in the queue for memory: lower was earlier."""
    queued_s: float = 0.0
    """When it took that place."""
    stuck: bool = False
    """In the queue, and no eviction would make room for it now: what could go is in use."""
    ready_s: float = -math.inf
    """When its worker was made ready."""
    failures: int = 0
    """Workers in a row that failed to load it, or died soon after."""
    retry_s: float = -math.inf
    """No worker is started before, after failures in a row."""
    backing_off: bool = False
    """In the queue, and waits for `retry_s`."""
    held_until_s: float = -math.inf
    """Ready, but who comes before then waits: it is to become idle, for a model that waits."""
    hold_again_s: float = -math.inf
    """Not held again before."""
    shrink_until_s: float = -math.inf
    """Its worker was told to shrink, and its answer is waited for until then."""
    shrink_again_s: float = -math.inf
    """Not told to shrink before: it has given what it could."""
    drain_until_s: float = math.inf
    drain_reason: StopReason = StopReason.ASKED
    progress: Progress = Progress()
    error: MlxdError | None = None

    @property
    def fixed(self) -> Fixed:
        """What is fixed for it now."""
        return Fixed(self.spec, self.pinned, self.keep_alive_s)

    @property
    def reserved_bytes(self) -> int:
        """What it holds, or is promised while it loads."""
        if not self.worker:  # as in all phases but the RESIDENT ones
            return 0
        assert self.plan is not None
        return self.plan.need_bytes

    @property
    def idle(self) -> bool:
        """Ready, and nobody uses it."""
        return self.phase is Phase.READY and not self.leases

    @property
    def held(self) -> bool:
        """Whether new requests wait though it is ready."""
        return self.held_until_s > -math.inf

    @property
    def gives_up_s(self) -> float:
        """When the next of those who wait for models in use has waited long enough."""
        return self.waits_since_s + config.ROOM_WAIT_MAX_S

    @property
    def waits_since_s(self) -> float:
        """Since when the one who has waited longest has."""
        since_s = [waiter.since_s for waiter in self.waiters] or [self.queued_s]
        return min(since_s)

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
    """What workers last said that their arrays hold, by their numbers."""
    pressed: frozenset[str] = frozenset()
    """Devices above the hard mark, and not below the soft one since; see `pressure`."""
    relieve_again_s: float = math.inf
    """When time alone lets more be done about that."""
    refused: int = 0
    """How many found no room to wait since queues were half empty: they come back apart."""
    next_worker: int = 1
    next_place: int = 1
    stopping: bool = False

    def device_named(self, name: str) -> Device:
        """Return a device; the first in the place of one that is gone, or has another name now."""
        for device in self.devices:
            if device.name == name:
                return device
        return self.devices[0]

    def home_of(self, model: Model) -> str:
        """Return the name of the device on which a model lives, or is to; "" without a plan."""
        return "" if model.plan is None else self.device_named(model.plan.device).name

    def lives_on(self, model: Model, device: Device) -> bool:
        """Return whether a model lives on `device`, or is to."""
        return self.home_of(model) == device.name

    def reserved_on(self, device: Device) -> int:
        """Return what all models that live on a device hold or are promised."""
        models = self.models.values()
        return sum(m.reserved_bytes for m in models if m.worker and self.lives_on(m, device))

    def held_on(self, device: Device) -> int:
        """Return what all workers were measured to hold on a device, or say that they do."""
        if device.held_bytes:
            return device.held_bytes
        here = {m.worker for m in self.models.values() if m.worker and self.lives_on(m, device)}
        return sum(nbytes for worker, nbytes in self.arrays.items() if worker in here)

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
        if worker == 0:
            return None
        return next((m for m in self.models.values() if m.worker == worker), None)

    def with_model(self, model: Model) -> State:
        """Return the state with `model` in place of its former self."""
        return replace(self, models={**self.models, model.digest: model})


def next_wake_s(state: State) -> float:
    """Return when time alone changes something; infinite: never."""
    models = state.models.values()
    times = [model.expires_s for model in models]
    times += [model.drain_until_s for model in models if model.phase is Phase.DRAINING]
    times += [model.retry_s for model in models if model.backing_off]
    times += [model.held_until_s for model in models if model.held]
    times.append(state.relieve_again_s)
    stuck = [model for model in models if model.stuck]
    if stuck:
        times += [model.gives_up_s for model in stuck]
        times.append(state.look_again_s)
    return min(times, default=math.inf)
