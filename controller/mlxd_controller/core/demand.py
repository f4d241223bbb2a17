"""Who waits until a model is ready, and on what terms. Immutable."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from mlxd_shared.domain.requests import LoadSpec


class Want(enum.Enum):
    """What a waiter waits for."""

    LEASE = "lease"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits until its model is ready."""

    ticket: str
    want: Want
    since_s: float


@dataclass(frozen=True, slots=True)
class Fixed:
    """What operators and requests fixed for a model, beyond one load."""

    spec: LoadSpec
    pinned: bool
    keep_alive_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Who waits until a model is ready, and on what terms."""

    waiters: tuple[Waiter, ...] = ()
    wanted: bool = False
    """A LoadModel requested it: the load goes on even if nobody waits."""
    before: Fixed | None = None
    """What was fixed before a load that has not begun; in force again if that is refused."""

    @property
    def stands(self) -> bool:
        """Whether a load is called for."""
        return bool(self.waiters) or self.wanted

    def add(self, waiter: Waiter, before: Fixed | None) -> Demand:
        """Return the demand with one more waiter, whose options replace what was fixed `before`."""
        wanted = self.wanted or waiter.want is Want.LOAD
        return Demand((*self.waiters, waiter), wanted, self.before or before)

    def drop(self, ticket: str) -> Demand:
        """Return the demand without one of its waiters."""
        return replace(self, waiters=tuple(w for w in self.waiters if w.ticket != ticket))


NO_DEMAND = Demand()
