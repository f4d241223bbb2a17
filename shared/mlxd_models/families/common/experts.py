"""Layers that send each token through a few of many small networks: their shape.

Invariants:
- What a family's router does otherwise is a field here, not a layer of its own.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.sizes.pass_sizes import routed_width

EXPERTS_MAX: Final = 4096
"""The most experts that a config may name."""

NETWORKS_MAX: Final = 1 << 16
"""The most of them in all layers together: each has tensors, of which a reader makes the names."""


class Scoring(StrEnum):
    """What makes shares of how much a router wants its experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    """Experts in groups, of which a token goes to the best alone."""

    count: int
    kept: int
    """How many groups a token's experts are chosen from."""
    best: int
    """A group is worth the sum of so many of its best experts."""


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """A network beside the experts, which every token goes through."""

    mlp: int
    name: str
    """Of its module, in names of tensors."""
    gated: bool = False
    """Whether each token has a gate for what it makes."""


@dataclass(frozen=True, slots=True)
class GateClamp:
    """A gate bounded above, and what it gates bounded on both sides, one more of that going in."""

    limit: float
    slope: float
    """What the gate is multiplied by within its sigmoid."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers that choose a few of many small networks for each token."""

    count: int
    chosen: int
    """How many a token goes through."""
    mlp: int
    """The inner width of one."""
    normalised: bool
    """Whether the chosen ones' weights are made to sum to one."""
    layers: tuple[bool, ...]
    """Which layers do; the others are dense."""
    clamp: GateClamp | None = None
    """How their gates differ from a layer's own activation."""
    biased: bool = False
    """Whether experts and router have biases."""
    router: str = "mlp.gate"
    """The router's name within a layer."""
    stack: str = "mlp.switch_mlp"
    """What the names of all experts' linears begin with within a layer."""
    scoring: Scoring = Scoring.SOFTMAX
    groups: GroupsConfig | None = None
    corrected: bool = False
    """Whether a stored number for each expert is added to its share for the choice alone."""
    scaling: float = 1.0
    """What the chosen ones' weights are multiplied by in the end."""
    shared: SharedConfig | None = None
    fused: bool = False
    """Whether checkpoints may store gates and ups of all experts in one tensor."""

    def feed_width(self, hidden: int) -> int:
        """Return the widest inner part of such a layer, for one position."""
        routed = routed_width(self.chosen, hidden, self.mlp)
        return routed if self.shared is None else routed + self.shared.mlp


def experts_of(fields: Fields, key: str, *, layers: int) -> int:
    """Return how many experts a layer has, where `layers` of them have some.

    Raises:
        InvalidModel: missing, mistyped, or too many for a layer or for all of them.
    """
    return fields.integer(key, low=1, high=min(EXPERTS_MAX, NETWORKS_MAX // max(layers, 1)))
