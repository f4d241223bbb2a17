"""What one architecture hands to the registry: how to read its config, check and build it.

Invariants:
- `tensors` and `footprint` are computed from the config alone, before any weight is read.
- Every stored tensor is one of `tensors` or the file is refused; every required one is present.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from mlxd_shared.cache_sizes import CacheSizes
from mlxd_shared.pass_sizes import PassSizes
from mlxd_shared.weights import TensorFact
from mlxd_worker.models.base import Model
from mlxd_worker.models.weights.expert_linear import ExpertProjection
from mlxd_worker.models.weights.linear import Projection
from mlxd_worker.models.weights.packing import Packing

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that checkpoints may store in place of one that is made of it, or of several."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[mx.array], mx.array]
    """Returns what it stands for, lazily."""
    dtype: str | None = None
    """As `TensorSpec.dtype`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a checkpoint of this config stores, or may store."""

    name: str
    shape: tuple[int, ...]
    required: bool = True
    copy_of: str | None = None
    """An optional tensor that must equal another one (a tied head that was stored all the same)."""
    other_shape: tuple[int, ...] | None = None
    """A second layout in which checkpoints store it; `Weights.shape` tells which it is."""
    packing: Packing | None = None
    """How its rows are packed, where the checkpoint stores scales beside it."""
    packed: bool = False
    """Whether it holds packed words, rather than numbers."""
    dtype: str | None = None
    """The one type that it is stored in, in the headers' word; None: any that holds numbers."""
    packable: bool = False
    """Whether a load may pack it that is told to, unless it is of a kind that is kept."""
    parts: tuple[str, ...] = ()
    """Names of its slices along the first axis, which checkpoints may store in its place."""
    source: Source | None = None
    """What is stored in its place; set by what `instead` says."""
    instead: tuple[tuple["TensorSpec", ...], ...] = ()
    """Other layouts: what takes its place where one of their sources is stored."""

    @property
    def stored_name(self) -> str:
        """The name that the checkpoint has for it."""
        return self.name if self.source is None else self.source.name


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes that decide what a model takes besides its weights, in values, not bytes."""

    context_max: int
    caches: CacheSizes
    """What the layers remember, by kind."""
    passes: PassSizes
    """The widths that decide what evaluating takes."""

    @property
    def vocab(self) -> int:
        """Width of the logits."""
        return self.passes.vocab


@dataclass(frozen=True, slots=True)
class Stack:
    """A weight `[experts, outputs, inputs]`, by names without `.weight`."""

    stem: str
    parts: tuple[str, ...]
    """Each expert's own, where a checkpoint stores these."""


class Weights(Protocol):
    """Where an architecture takes its tensors from while it is built."""

    @property
    def dtype(self) -> mx.Dtype:
        """What floating weights become."""
        ...

    @property
    def keeps_packed(self) -> bool:
        """Whether weights that are packed stay so."""
        ...

    def take_stored(self) -> dict[str, mx.array]:
        """Return all tensors as they are stored, lazy: for one who makes others of them."""
        ...

    def evaluate(self, made: Mapping[str, mx.array]) -> None:
        """Evaluate what was made of them, one by one.

        Raises:
            InvalidModel: a file could not be read after all.
        """
        ...

    def has(self, name: str) -> bool:
        """Tell whether a tensor is stored under this name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a required tensor as it is stored; nothing is read."""
        ...

    def take(self, name: str) -> mx.array:
        """Return one tensor, evaluated, in the form that the residency plan chose."""
        ...

    def take_float32(self, name: str) -> mx.array:
        """Return one small tensor, evaluated, in float32 whatever the plan chose."""
        ...

    def take_stacked(self, names: Sequence[str]) -> mx.array:
        """Return tensors joined along their first axis, evaluated; the parts are dropped."""
        ...

    def linear(self, stems: Sequence[str], *, has_bias: bool = False) -> Projection:
        """Return linears over one input as one, their outputs in this order.

        A stem is a weight's name without `.weight`. They stay packed where the plan keeps that.
        """
        ...

    def experts(self, stacks: Sequence[Stack], *, has_bias: bool = False) -> ExpertProjection:
        """Return experts' linears over one input as one, their outputs in this order.

        Raises:
            InvalidModel: some of them are packed unlike others.
        """
        ...


@dataclass(frozen=True, slots=True)
class Architecture(Generic[Config]):
    """One model family under one config type."""

    parse: Callable[[Mapping[str, Any]], Config]
    tensors: Callable[[Config], tuple[TensorSpec, ...]]
    footprint: Callable[[Config], Footprint]
    build: Callable[[Config, Weights], Model]
    name_of: Callable[[str], str | None] = str
    """By what name `tensors` knows a stored tensor; None for one that is known, and left unread."""
    restore: Callable[[Config, Sequence[TensorFact]], tuple[TensorSpec, ...]] | None = None
    """Where what is stored is read by other rules than these: checks it all, nothing being read,
    and returns what will be made of it, packed as it will be."""
