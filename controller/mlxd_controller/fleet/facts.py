"""What agents and controllers tell each other: frozen values, which any call can carry."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_controller.runtime.ports import Holding
from mlxd_controller.settings import Limits, StorePlaces
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.domain.figures import HostMemory

NO_STORES = StorePlaces()


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How a controller wants workers to be started on every node.

    `tls` is the folder of the node's certificate, key and token, the same path on all machines; ""
    where workers listen on loopback. `findings` is the file of `mlxd doctor`; "" for none. `stores`
    are looked into for models. All these paths are the node's own. The limits apply to each device.
    A node that answers no report for `silent_s` is lost. Workers outlive a controller that has said
    nothing for so long by `orphan_grace_s`; an agent that ends they do not outlive.
    """

    limits: Limits
    stall_timeout_s: float
    orphan_grace_s: float
    silent_s: float = config.FLEET_SILENT_S
    waiting_max: int | None = None
    tls: str = ""
    findings: str = ""
    stores: StorePlaces = NO_STORES

    @property
    def of_workers(self) -> tuple[object, ...]:
        """What workers are started with: those that were started with other options have to go."""
        return (self.waiting_max, self.tls, self.findings)


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file of a model: its name, perhaps in one of the model's folders, and its size."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Lines:
    """The output of one worker that was not reported yet; `end` numbers the line that follows."""

    incarnation: str
    lines: tuple[str, ...]
    end: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node as it is: `devices` named NODE/DEVICE; `oom_kills` None where that is unknown."""

    version: str
    devices: tuple[Device, ...]
    memory: HostMemory
    oom_kills: int | None
    output: tuple[Lines, ...] = ()


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that listens on a node."""

    incarnation: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A worker of an earlier controller that lives, and what it holds ready."""

    worker: Launched
    holding: Holding


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a worker: its exit code and last lines, and the node's count of kills by then."""

    code: int
    output: Lines
    oom_kills: int | None
