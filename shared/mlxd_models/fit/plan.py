"""How a model would live on a device, and what that needs: the sum of named terms. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlxd_shared import config
from mlxd_shared.domain.devices import JOINT, DeviceKind
from mlxd_shared.domain.requests import KVFormat, Weights

WEIGHTS_TERM = "weights"
KV_TERM = "kv"
PREFIX_TERM = "prefix"
ACTIVATIONS_TERM = "activations"
POOL_TERM = "pool"
PROCESS_TERM = "process"
TERMS = (WEIGHTS_TERM, KV_TERM, PREFIX_TERM, ACTIVATIONS_TERM, POOL_TERM, PROCESS_TERM)
"""The names of a plan's terms, as errors have them too."""


@dataclass(frozen=True, slots=True)
class Device:
    """One memory: `budget_bytes` is what mlxd may ever use of it, after the reserve.

    `name` tells it from all others, and is what a plan names. `node` names the machine that it
    belongs to; "" is the only one there is. A GPU has an `id` of its own, by which it is made
    visible to a worker, and is of a `product`.

    `usable_bytes`, at most the budget, leaves out what other programs hold now. `prefix_fraction`
    of the budget is what one model keeps of former prompts, where nobody says. `held_bytes` is what
    workers were measured to hold; 0 where only they can tell.
    """

    name: str
    kind: DeviceKind
    total_bytes: int
    reserve_bytes: int
    budget_bytes: int
    usable_bytes: int
    prefix_fraction: float = config.PREFIX_MEMORY_FRACTION
    held_bytes: int = 0
    id: str = ""
    product: str = ""
    holds_process: bool = False
    """Whether the process that loads is there already, and the budget is what it leaves."""
    node: str = ""
    lost: bool = False
    """Whether its machine cannot be reached: nothing lives there, and its figures are the last."""
    models_max: int | None = None
    """How many models can live there, whatever they take; None: as many as fit."""
    workers: tuple[str, ...] = ()
    """Names of the workers that somebody else starts there; (): the controller starts its own."""
    members: tuple[str, ...] = ()
    """Of a group that ranks share: each rank's device; the figures are then one rank's."""

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU runs the products."""
        return self.kind is DeviceKind.CPU

    @property
    def ranks(self) -> int:
        """How many processes share a model there: one for each member of a group."""
        return len(self.members) or 1

    @property
    def parts(self) -> Mapping[str, int]:
        """The devices that it consists of, by name, and how many ranks each has."""
        return Counter(self.members or (self.name,))


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of a need."""

    name: str
    nbytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Choice:
    """How a model is to live. `prefix_bytes` None leaves the prefix cache open."""

    weights: Weights
    context_length: int
    rows_max: int
    kv_format: KVFormat
    prefix_bytes: int | None
    ranks: int = 1

    @property
    def way(self) -> Choice:
        """What measurements hold for, whatever is kept of former prompts."""
        return replace(self, prefix_bytes=None)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model would live on a device, or on each of a group's, and what that needs.

    `devices` has one for each rank, and what is said of bytes, a prefix cache's among them, is one
    rank's: all have equally much.
    """

    devices: tuple[str, ...]
    choice: Choice
    terms: tuple[Term, ...]

    @property
    def device(self) -> str:
        """The name of the device, or of the group."""
        return JOINT.join(self.devices)

    @property
    def ranks(self) -> int:
        """How many processes share the model."""
        return len(self.devices)

    def need_on(self, device: str) -> int:
        """Return what all its ranks need on the device of this name."""
        return self.need_bytes * self.devices.count(device)

    @property
    def weights(self) -> Weights:
        """The form of the weights."""
        return self.choice.weights

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion together."""
        return self.choice.context_length

    @property
    def rows_max(self) -> int:
        """Streams decoded side by side."""
        return self.choice.rows_max

    @property
    def kv_format(self) -> KVFormat:
        """The form of keys and values."""
        return self.choice.kv_format

    @property
    def prefix_bytes(self) -> int:
        """What snapshots of former prompts may take."""
        return self.nbytes_of(PREFIX_TERM)

    def nbytes_of(self, name: str) -> int:
        """Return what the terms of one name take."""
        return sum(term.nbytes for term in self.terms if term.name == name)

    @property
    def need_bytes(self) -> int:
        """The sum of the terms."""
        return sum(term.nbytes for term in self.terms)

    @property
    def term_bytes(self) -> tuple[int, ...]:
        """Each term by the order of `TERMS`; their sum is the need."""
        return tuple(self.nbytes_of(name) for name in TERMS)

    @property
    def least_bytes(self) -> int:
        """The need without what may be given up: an open prefix cache."""
        return self.need_bytes - (self.prefix_bytes if self.choice.prefix_bytes is None else 0)

    @property
    def arrays_bytes(self) -> int:
        """The need but for the process itself: what MLX is to hold at most."""
        return self.need_bytes - self.nbytes_of(PROCESS_TERM)

    def within(self, room_bytes: int) -> Plan:
        """Return the plan with as much of an open prefix cache as fits into `room_bytes`."""
        spare = max(0, room_bytes - self.least_bytes)
        if self.choice.prefix_bytes is not None or self.prefix_bytes <= spare:
            return self
        shrunk = Term(PREFIX_TERM, spare, "what is left of the memory that is free")
        terms = (shrunk if term.name == PREFIX_TERM else term for term in self.terms)
        return replace(self, terms=tuple(terms))
