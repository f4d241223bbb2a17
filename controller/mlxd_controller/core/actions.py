"""What the scheduler wants done. Each ticket gets exactly one of Grant, Done and Refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mlxd_controller.core.phases import StopReason
from mlxd_models.fit.facts import Division
from mlxd_models.fit.plan import Plan
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import LoadSpec


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Launch worker number `worker` and load the model as `plan` says.

    Answered by Ready or LoadFailed, once. `reason` is "request" or "load"; `restart` is the class
    of the error that ended the worker before, or "".
    """

    worker: int
    digest: str
    name: str
    path: str
    plan: Plan
    spec: LoadSpec
    reason: str
    restart: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker, whatever it is doing. Answered by Unloaded, once, when it is gone."""

    worker: int
    digest: str
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Shrink:
    """Have a worker release what no stream needs until its arrays hold at most `target_bytes`.

    Answered by Shrunk; an answer that does not come within SHRINK_TIMEOUT_S is not waited for.
    """

    worker: int
    digest: str
    target_bytes: int


@dataclass(frozen=True, slots=True)
class AbortStreams:
    """End these streams with this error; their leases are gone already."""

    tickets: tuple[str, ...]
    error: MlxdError


@dataclass(frozen=True, slots=True)
class Grant:
    """A request may use the worker, until it is released. `waited_s` is what it waited for it."""

    ticket: str
    worker: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """A load or an unload that was asked for is complete; `streams_aborted` is an unload's."""

    ticket: str
    streams_aborted: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """A request cannot be served."""

    ticket: str
    error: MlxdError


@dataclass(frozen=True, slots=True)
class DescribeRanks:
    """Describe what ranks have of a model, and decide the same event again. It comes alone."""

    division: Division


Action: TypeAlias = (
    StartLoad | StopWorker | Shrink | AbortStreams | Grant | Done | Refuse | DescribeRanks
)
