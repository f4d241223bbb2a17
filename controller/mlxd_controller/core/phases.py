"""The phases of a model's life, each with exactly the fields that it has. Immutable.

Invariants:
- A worker and the plan whose bytes are reserved for it exist in the Resident phases only; in Ready
  the plan is corrected by what was measured.
- The plans of Queued are one at least, and so are the leases of Draining.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TypeAlias

from mlxd_controller.core.demand import NO_DEMAND, Demand
from mlxd_models.fit.plan import Plan
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import LoadProgress


class StopReason(enum.Enum):
    """Why a worker is stopped."""

    ROOM = "room"
    EXPIRED = "expired"
    ASKED = "asked"
    PRESSURE = "pressure"
    SHUTDOWN = "shutdown"
    SURPLUS = "surplus"
    """It ran before it was known here, and there is no room for it."""


@dataclass(frozen=True, slots=True)
class Cold:
    """Nothing of the model is loaded, or waits to be."""


@dataclass(frozen=True, slots=True)
class Unloaded(Cold):
    """It was never loaded, or was unloaded."""


@dataclass(frozen=True, slots=True)
class Failed(Cold):
    """Its last worker failed to load it, or died."""

    error: MlxdError


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits for memory."""

    plans: tuple[Plan, ...]
    """How it would live on each device that can hold it, and is not lost."""
    place: int
    """Place in the queue: lower was earlier."""
    since_s: float
    """When it took that place."""
    demand: Demand
    error: MlxdError | None = None
    """Why its last worker failed, if it did."""
    stuck: bool = False
    """No eviction would make room for it now: what could go is in use."""
    backing_off: bool = False
    """It waits for the model's `retry_s`, and has no claim on memory meanwhile."""

    @property
    def plan(self) -> Plan:
        """How it would live on the first device."""
        return self.plans[0]

    @property
    def waits_since_s(self) -> float:
        """Since when the one who has waited longest has."""
        return min((waiter.since_s for waiter in self.demand.waiters), default=self.since_s)

    @property
    def gives_up_s(self) -> float:
        """When the next of those who wait for models in use has waited long enough."""
        return self.waits_since_s + config.ROOM_WAIT_MAX_S


@dataclass(frozen=True, slots=True)
class Resident:
    """A worker process has the memory that `plan` needs."""

    worker: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Loading(Resident):
    """Its worker is being launched, or reads the weights."""

    began_s: float
    demand: Demand
    progress: LoadProgress


@dataclass(frozen=True, slots=True)
class Hold:
    """Who comes now waits though the model is ready: it is to become idle, for one that waits."""

    until_s: float
    demand: Demand = NO_DEMAND


@dataclass(frozen=True, slots=True)
class Ready(Resident):
    """Its worker serves requests."""

    since_s: float
    leases: frozenset[str] = frozenset()
    hold: Hold | None = None
    shrink_until_s: float | None = None
    """Its worker has an order to shrink, and the answer is waited for until then."""
    shrink_again_s: float | None = None
    """No order to shrink before: it has given what it could."""


@dataclass(frozen=True, slots=True)
class Draining(Resident):
    """It takes no request any more, and is unloaded when the last one ends or at `until_s`."""

    leases: frozenset[str]
    until_s: float
    reason: StopReason
    unloaders: tuple[str, ...] = ()
    shrink_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unloading(Resident):
    """Its worker is being stopped; who comes now waits for the next one."""

    reason: StopReason
    demand: Demand = NO_DEMAND
    unloaders: tuple[str, ...] = ()
    streams_aborted: int = 0


Phase: TypeAlias = Unloaded | Queued | Loading | Ready | Draining | Unloading | Failed
"""See types.proto ModelState."""

Joinable: TypeAlias = Queued | Loading | Ready
"""Phases in which a load joins the plan there is; after the others it makes a new one."""

UNLOADED = Unloaded()


def demand_of(phase: Phase) -> Demand:
    """Return who waits in `phase`, and on what terms."""
    match phase:
        case Queued() | Loading() | Unloading():
            return phase.demand
        case Ready():
            return NO_DEMAND if phase.hold is None else phase.hold.demand
        case Unloaded() | Failed() | Draining():
            return NO_DEMAND


def with_demand(phase: Phase, demand: Demand) -> Phase:
    """Return `phase` with `demand` in place of its own; only none where nobody can wait."""
    match phase:
        case Queued() | Loading() | Unloading():
            return replace(phase, demand=demand)
        case Ready(hold=Hold() as hold):
            return replace(phase, hold=replace(hold, demand=demand))
        case Unloaded() | Failed() | Ready() | Draining():
            assert demand == NO_DEMAND, "nobody can wait in this phase"
            return phase


def without_ticket(phase: Phase, ticket: str) -> Phase:
    """Return `phase` without one who waits in it, for a load or an unload."""
    phase = with_demand(phase, demand_of(phase).drop(ticket))
    if isinstance(phase, Draining | Unloading):
        unloaders = tuple(other for other in phase.unloaders if other != ticket)
        return replace(phase, unloaders=unloaders)
    return phase


def lies_ahead(moment_s: float | None, now_s: float) -> bool:
    """Return whether there is such a moment, and `now_s` is before it."""
    return moment_s is not None and now_s < moment_s
