"""The tensors that a checkpoint holds, or may hold, as a config alone says them. Pure.

Invariants:
- What is stored in place of a tensor is made into it by a named operation: the name is known here,
  and the arrays to whoever builds the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from mlxd_models.families.common.packing import WORD_BITS, Packing, Packings


class Operation(StrEnum):
    """What makes a tensor of the one that is stored in its place."""

    KEEP = "keep"
    """Nothing: it only has another name."""
    WORDS = "words"
    """Four bytes become a word of 32 bits."""
    FULL_SCALE = "full_scale"
    """It becomes float32 and is multiplied by `NVFP4_FULL_SCALE`."""
    OUTPUTS = "outputs"
    """Some of the outputs are taken, which are the second axis."""
    OUTPUT_WORDS = "output_words"
    """Blocks of bytes become one row of words, and some of the outputs are taken."""
    LAST_OUTPUTS = "last_outputs"
    """Some of the outputs are taken, which are the last axis and become the second."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which outputs are a tensor's own where several tensors are stored as one, in turns."""

    first: int = 0
    step: int = 1

    @property
    def outputs(self) -> slice:
        """Their places among all outputs."""
        return slice(self.first, None, self.step)


WHOLE: Final = Turn()
"""All outputs are one tensor's."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that checkpoints may store in place of one or several that are made from it."""

    name: str
    shape: tuple[int, ...]
    operation: Operation
    """How the model's tensor is made from the stored one."""
    dtype: str | None = None
    """As `TensorSpec.dtype`."""
    turn: Turn = WHOLE


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a checkpoint of this config stores, or may store."""

    name: str
    shape: tuple[int, ...]
    required: bool = True
    copy_of: str | None = None
    """An optional tensor that must equal another one (a tied head that was stored all the same)."""
    other_shape: tuple[int, ...] | None = None
    """A second layout in which checkpoints store it; its header tells which it is."""
    packing: Packing | None = None
    """How its rows are packed, if the checkpoint stores scales for it."""
    packed: bool = False
    """Whether it holds packed words, rather than numbers."""
    dtype: str | None = None
    """The only type that it is stored in, as headers name it; None: any type of numbers."""
    packable: bool = False
    """Whether a load may pack it on request, unless its kind stays unpacked."""
    parts: tuple[str, ...] = ()
    """Names of its slices along the first axis, which checkpoints may store in its place."""
    source: Source | None = None
    """What is stored in its place, according to `instead`."""
    instead: tuple[tuple[TensorSpec, ...], ...] = ()
    """Other layouts: what takes its place where one of their sources is stored."""
    beside: bool = False
    """Whether it is a scale or an offset of another weight."""
    exact: bool = False
    """Whether it lives as float32, whatever form others live in."""
    joins: str = ""
    """What it becomes a part of, with all others that say the same, or alone where that is taken
    apart: all of it is there twice for a moment. Empty: it is taken as it is."""

    @property
    def stored_name(self) -> str:
        """The checkpoint's name for it."""
        return self.name if self.source is None else self.source.name

    @property
    def values(self) -> int:
        """How many of the model's values it holds; 0 for scales and offsets of another weight."""
        if self.beside:
            return 0
        count = math.prod(self.shape)
        packed = self.packing if self.packed else None
        return count if packed is None else count * WORD_BITS // packed.bits


@dataclass(frozen=True, slots=True)
class Stack:
    """A weight `[experts, outputs, inputs]`, by names without `.weight`."""

    stem: str
    parts: tuple[str, ...]
    """Each expert's own, where a checkpoint stores these."""


def linear_specs(
    packings: Packings | None,
    prefix: str,
    shapes: Mapping[str, tuple[int, int, bool]],
    *,
    joined: Collection[str] = (),
) -> list[TensorSpec]:
    """Return weights, and biases where there are any, of (outputs, inputs, has a bias) by name.

    joined: the names of those that a builder makes one of.
    """
    specs: list[TensorSpec] = []
    for name, (outputs, inputs, has_bias) in shapes.items():
        joins = prefix + name.rpartition(".")[0] if name in joined else ""
        weight = weight_spec(packings, f"{prefix}{name}.weight", (outputs, inputs))
        specs.append(replace(weight, joins=joins))
        if has_bias:
            specs.append(TensorSpec(f"{prefix}{name}.bias", (outputs,), joins=joins))
    return specs


def weight_spec(
    packings: Packings | None,
    name: str,
    shape: tuple[int, ...],
    *,
    required: bool = True,
    copy_of: str | None = None,
) -> TensorSpec:
    """Return the spec of a weight that may be packed as `packings` say."""
    packing: Packing | None = None
    if packings is not None:
        packing = packings.of(name.removesuffix(".weight"), inputs=shape[-1])
    return TensorSpec(
        name, shape, required=required, copy_of=copy_of, packing=packing, packable=True
    )
