"""What happens to the scheduler. Frozen messages; `worker` is the serial number of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from mlxd_controller.core.state import NOTHING_FIXED
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.measured import Figures
from mlxd_models.fit.plan import Choice, Device
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request needs a lease on a model. `keep_alive_s` None keeps what was said before."""

    ticket: str
    digest: str
    name: str
    path: str
    facts: ModelFacts
    keep_alive_s: float | None = None
    configured: LoadSpec = NOTHING_FIXED
    """What the configuration fixes for loads of the model."""


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """An operator wants a model ready. What `spec` leaves open stays as it is."""

    ticket: str
    digest: str
    name: str
    path: str
    facts: ModelFacts
    spec: LoadSpec = NOTHING_FIXED
    configured: LoadSpec = NOTHING_FIXED


@dataclass(frozen=True, slots=True)
class Released:
    """A request is over, however it ended, wherever its ticket is; an unknown ticket is no harm.

    One event for giving up and for finishing: the two race with the grant, and nobody can tell.
    """

    ticket: str
    digest: str


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """An operator wants a model gone: at once with `force`, else after at most `grace_s`."""

    ticket: str
    digest: str
    grace_s: float
    force: bool


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker holds a model ready, and is this controller's now.

    A former controller started it, or its machine was lost and is back; there the edge itself ends,
    before, what holds a model that is not cold.

    `choice` is how the model lives, on a device or a group of this name; `spec` is what was fixed
    for it. Those of pinned and dear models come first: where there is no room for all, the later
    ones are unloaded.
    """

    worker: int
    digest: str
    name: str
    path: str
    facts: ModelFacts
    choice: Choice
    device: str
    spec: LoadSpec
    load_s: float
    configured: LoadSpec = NOTHING_FIXED


@dataclass(frozen=True, slots=True)
class Progressed:
    """A load went on."""

    worker: int
    progress: LoadProgress


@dataclass(frozen=True, slots=True)
class Ready:
    """A load is complete: the worker can serve now."""

    worker: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A ready worker says what it takes."""

    worker: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load ended without success, and its process is gone."""

    worker: int
    error: MlxdError


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The process of a ready worker ended by itself."""

    worker: int
    error: MlxdError


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A worker that was told to stop is gone, with all its memory."""

    worker: int


@dataclass(frozen=True, slots=True)
class MemoryRead:
    """The devices were measured, and what workers last said that they hold (by their numbers).

    Of a worker that has not said anything nothing is in `arrays`.
    """

    devices: tuple[Device, ...]
    arrays: Mapping[int, int] = field(default_factory=dict)
    prefix_reload_s: Mapping[int, float] = field(default_factory=dict)
    """What the next request would compute or read again of prompts, had the model been unloaded."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A worker that was told to shrink has answered, or has failed to (both figures 0)."""

    worker: int
    before_bytes: int = 0
    after_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class ShutDown:
    """The controller stops: nothing new, `grace_s` for what runs, then everything is unloaded."""

    grace_s: float


Event: TypeAlias = (
    Adopted
    | Arrived
    | LoadAsked
    | Released
    | UnloadAsked
    | Progressed
    | Ready
    | Measured
    | LoadFailed
    | WorkerDied
    | Unloaded
    | MemoryRead
    | Shrunk
    | Tick
    | ShutDown
)
