"""Which part of each stored tensor one of several ranks has. Pure.

Invariants:
- Of a linear either the outputs are divided or the inputs: by its name, whoever it belongs to.
- A part is a run of places along one axis of what is stored, of equal length on all ranks: whole
  groups of packed values, with their scales, and gates with the ups that are stored beside them.
- A bias is divided with outputs. Beside divided inputs it is whole: it is added once, to the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from mlxd_models.families.common.decoder import ATTENTION, SINKS
from mlxd_models.families.common.packing import FP8_DTYPE, WORD_BITS
from mlxd_models.families.common.tensors import Operation, TensorSpec
from mlxd_models.files.weights import TensorFact

COLUMNS: Final = (*ATTENTION, ".gate_proj", ".up_proj")
"""Linears whose outputs are divided, each by itself where several are joined; experts' too."""

ROWS: Final = ("self_attn.o_proj", ".down_proj")
"""Linears whose inputs are divided, and whose products are summed over the ranks."""

_OF_WHOLE: Final = ("global_scale", "input_scale")
"""What a weight has one of, or each expert's."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of places along one axis of a tensor."""

    axis: int
    span: range

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return what it makes of a tensor's shape."""
        return (*shape[: self.axis], len(self.span), *shape[self.axis + 1 :])


class Side(Enum):
    """What of a linear is divided."""

    OUTPUTS = auto()
    INPUTS = auto()


def side_of(name: str) -> Side | None:
    """Return what is divided of the linear that a tensor belongs to; None: all ranks have it."""
    stem = name.rpartition(".")[0]
    if stem.endswith(COLUMNS) or name.endswith(SINKS):
        return Side.OUTPUTS
    return Side.INPUTS if stem.endswith(ROWS) else None


def axis_of(spec: TensorSpec) -> int | None:
    """Return along which axis a tensor is divided, as the model has it; None: it is whole."""
    side, part = side_of(spec.name), spec.name.rpartition(".")[2]
    if side is None or part in _OF_WHOLE:
        return None
    if spec.name.endswith(SINKS):
        return 0
    last = len(spec.shape) - 1
    if part == "bias":
        return last if side is Side.OUTPUTS else None
    return last - 1 if side is Side.OUTPUTS else last


def part_of(spec: TensorSpec, rank: int, ranks: int) -> Part | None:
    """Return what a rank has of the stored tensor that becomes this one; None: all of it.

    The ranks divide it (`uneven_problem`).
    """
    axis = axis_of(spec)
    if axis is None:
        return None
    shape = spec.shape
    if spec.source is not None:
        shape = spec.source.shape
        if spec.source.operation is Operation.LAST_OUTPUTS:
            axis = len(shape) - axis  # the last two are turned
    width = shape[axis] // ranks
    return Part(axis, range(rank * width, (rank + 1) * width))


def parts_of(specs: Iterable[TensorSpec], rank: int, ranks: int) -> dict[str, Part]:
    """Return a rank's parts of stored tensors by name; what is not there, it has all of."""
    parts: dict[str, Part] = {}
    for spec in specs:
        part = part_of(spec, rank, ranks)
        if part is not None:
            assert parts.setdefault(spec.stored_name, part) == part, "stored in turns, cut alike"
    return parts


def uneven_problem(spec: TensorSpec, ranks: int) -> str:
    """Return why ranks cannot divide a tensor; empty: they can."""
    axis = axis_of(spec)
    if axis is None or spec.beside:
        return ""
    count, unit, packing = spec.shape[axis], 1, spec.packing
    side = "outputs" if side_of(spec.name) is Side.OUTPUTS else "inputs"
    if packing is not None and (spec.packed or spec.dtype == FP8_DTYPE):
        unit = packing.block_rows if side == "outputs" else packing.group_size
        if side == "inputs" and spec.packed:
            count = count * WORD_BITS // packing.bits
    if count % ranks:
        return f"{count} {side} cannot be divided over {ranks} ranks"
    if count // ranks % unit:
        return f"{count} {side} over {ranks} ranks are not whole groups of {unit} on each"
    return ""


def spec_of_rank(spec: TensorSpec, ranks: int) -> TensorSpec:
    """Return what a rank has of a tensor, any of the ranks."""
    axis, part, source = axis_of(spec), part_of(spec, 0, ranks), spec.source
    if axis is None or part is None:
        return spec
    shape = (*spec.shape[:axis], spec.shape[axis] // ranks, *spec.shape[axis + 1 :])
    source = None if source is None else replace(source, shape=part.of(source.shape))
    return replace(spec, shape=shape, source=source)


def fact_of_part(fact: TensorFact, part: Part | None) -> TensorFact:
    """Return a stored tensor's fact with the shape and size of a part of it."""
    if part is None:
        return fact
    nbytes = fact.nbytes // fact.shape[part.axis] * len(part.span)
    return replace(fact, shape=part.of(fact.shape), nbytes=nbytes)
