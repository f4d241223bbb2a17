"""Layers that send each token through a few of many small networks: their shape and tensors.

Invariants:
- What a family's router does otherwise is a field here, not a layer of its own.
- Experts' weights are expected in one tensor a linear, and may be there one by one.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.packing import Packings
from mlxd_models.families.common.tensors import (
    Operation,
    Source,
    Stack,
    TensorSpec,
    linear_specs,
    weight_spec,
)
from mlxd_models.sizes.pass_sizes import routed_width

CORRECTION = "mlp.gate.e_score_correction_bias"
EXPERT_GATED = ("gate_proj", "up_proj")
EXPERT_DOWN = "down_proj"
FUSED_GATED = "mlp.experts.gate_up_proj"
FUSED_DOWN = "mlp.experts.down_proj"
EXPERT_LINEARS = (*EXPERT_GATED, EXPERT_DOWN)

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
    fused_by_input: bool = False
    """Whether such tensors are stored input by input, outputs being the last axis."""

    def feed_width(self, hidden: int) -> int:
        """Return the widest inner part of such a layer, for one position."""
        routed = routed_width(self.chosen, hidden, self.mlp)
        return routed if self.shared is None else routed + self.shared.mlp


def experts_of(fields: Fields, key: str, *, layers: int) -> int:
    """Return how many experts a layer has, where `layers` of them have some."""
    return fields.integer(key, low=1, high=min(EXPERTS_MAX, NETWORKS_MAX // max(layers, 1)))


def expert_specs(
    experts: ExpertsConfig, prefix: str, *, hidden: int, packings: Packings | None
) -> list[TensorSpec]:
    """Return the router's weight, each expert's in one tensor or one by one, and those beside."""
    mlp = experts.mlp
    specs = [weight_spec(packings, f"{prefix}{experts.router}.weight", (experts.count, hidden))]
    if experts.biased:
        specs.append(TensorSpec(f"{prefix}{experts.router}.bias", (experts.count,)))
    if experts.corrected:
        specs.append(TensorSpec(f"{prefix}{CORRECTION}", (experts.count,), exact=True))
    if experts.shared is not None:
        specs += _shared_specs(experts.shared, prefix, hidden=hidden, packings=packings)
    for name in EXPERT_LINEARS:
        outputs, inputs = (hidden, mlp) if name == EXPERT_DOWN else (mlp, hidden)
        stack = expert_stack(prefix, name, experts)
        whole = weight_spec(packings, f"{stack.stem}.weight", (experts.count, outputs, inputs))
        instead = ((_fused_spec(experts, prefix, name, hidden),),) if experts.fused else ()
        parts = tuple(f"{part}.weight" for part in stack.parts)
        joins = f"{prefix}{experts.stack}" if name in EXPERT_GATED else ""
        specs.append(replace(whole, parts=parts, instead=instead, joins=joins))
        if experts.biased:
            bias = f"{stack.stem}.bias"
            specs.append(TensorSpec(bias, (experts.count, outputs), joins=joins))
    return specs


def _fused_spec(experts: ExpertsConfig, prefix: str, name: str, hidden: int) -> TensorSpec:
    """Return what may be stored in place of a stack, and of the one that it is joined with.

    It is stored without `.weight`.
    """
    mlp = experts.mlp
    stem, shape = prefix + FUSED_GATED, (experts.count, 2 * mlp, hidden)
    if name == EXPERT_DOWN:
        stem, shape = prefix + FUSED_DOWN, (experts.count, hidden, mlp)
    source = Source(stem, shape, Operation.KEEP)
    if experts.fused_by_input:
        count, outputs, inputs = shape
        source = Source(stem, (count, inputs, outputs), Operation.LAST_OUTPUTS)
    return TensorSpec(f"{stem}.weight", shape, packable=True, source=source)


def _shared_specs(
    shared: SharedConfig, prefix: str, *, hidden: int, packings: Packings | None
) -> list[TensorSpec]:
    module = f"mlp.{shared.name}"
    gated = tuple(f"{module}.{name}" for name in EXPERT_GATED)
    shapes = dict.fromkeys(gated, (shared.mlp, hidden, False))
    shapes |= {f"{module}.{EXPERT_DOWN}": (hidden, shared.mlp, False)}
    if shared.gated:
        shapes |= {f"{module}_gate": (1, hidden, False)}
    return linear_specs(packings, prefix, shapes, joined=gated)


def expert_stack(prefix: str, name: str, experts: ExpertsConfig) -> Stack:
    """Return the names of one linear of all experts of a layer."""
    parts = tuple(f"{prefix}mlp.experts.{expert}.{name}" for expert in range(experts.count))
    return Stack(f"{prefix}{experts.stack}.{name}", parts)
