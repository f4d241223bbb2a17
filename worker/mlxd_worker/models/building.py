"""What builds a model that `mlxd_models` describes: where its tensors come from, and a function.

Invariants:
- A builder takes every required tensor of the description, and keeps nothing else of the weights.
- Builders are found by the module that a description names, which is imported for its first model.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx

from mlxd_models.families.common.family import Family
from mlxd_models.families.common.tensors import Stack
from mlxd_worker.models.base import Model
from mlxd_worker.models.weights.expert_linear import ExpertProjection
from mlxd_worker.models.weights.linear import Projection


class Weights(Protocol):
    """Where an architecture takes its tensors from while it is built."""

    @property
    def dtype(self) -> mx.Dtype:
        """What floating weights become."""

    @property
    def keeps_packed(self) -> bool:
        """Whether weights that are packed stay so."""

    def take_stored(self) -> dict[str, mx.array]:
        """Return all tensors as they are stored, lazy: for one who makes others of them."""

    def evaluate(self, arrays: Mapping[str, mx.array]) -> None:
        """Evaluate what was made of them, one by one; raises InvalidModel for a bad file."""

    def has(self, name: str) -> bool:
        """Tell whether a tensor is stored under this name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a required tensor as it is stored; nothing is read."""

    def take(self, name: str) -> mx.array:
        """Return one tensor, evaluated, in the form that the residency plan chose."""

    def take_float32(self, name: str) -> mx.array:
        """Return one small tensor, evaluated, in float32 whatever the plan chose."""

    def take_stacked(self, names: Sequence[str]) -> mx.array:
        """Return tensors joined along their first axis, evaluated; the parts are dropped."""

    def linear(self, stems: Sequence[str], *, has_bias: bool = False) -> Projection:
        """Return linears over one input as one, their outputs in this order.

        A stem is a weight's name without `.weight`. They stay packed where the plan keeps that.
        """

    def experts(self, stacks: Sequence[Stack], *, has_bias: bool = False) -> ExpertProjection:
        """Return experts' linears over one input as one, their outputs in this order."""


Builder = Callable[[Any, Weights], Model]
"""Builds a model of the config that its family parsed; takes all weights.

Raises InvalidModel where a file cannot be read after all.
"""


def builder_of(family: Family[Any]) -> Builder:
    """Return what builds a family's models."""
    return cast("Builder", importlib.import_module(family.builder).build)
