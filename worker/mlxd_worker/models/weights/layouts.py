"""What makes tensors of those stored in their place: an operation for each, and stacks of experts'.

Invariants:
- Operations are lazy: nothing is read before what is made is evaluated.
- A stack, of matrices or of their biases, is one tensor, or as many as there are experts, in order.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import mlx.core as mx

from mlxd_models.families.common.packing import NVFP4_FULL_SCALE
from mlxd_models.families.common.tensors import Operation, Source
from mlxd_worker.models.weights.lazy_tensors import Slab

Shape = tuple[int, ...]

OPERATIONS: Final[Mapping[Operation, Callable[[mx.array, slice], mx.array]]] = MappingProxyType(
    {
        Operation.KEEP: lambda stored, _: stored,
        Operation.WORDS: lambda stored, _: stored.view(mx.uint32),
        Operation.FULL_SCALE: lambda stored, _: stored.astype(mx.float32) * NVFP4_FULL_SCALE,
        Operation.OUTPUTS: lambda stored, own: stored[:, own],
        Operation.OUTPUT_WORDS: lambda stored, own: stored.view(mx.uint32).flatten(-2)[:, own],
        Operation.LAST_OUTPUTS: lambda stored, own: stored[:, :, own].swapaxes(1, 2),
    }
)
"""By operation, of what is stored and which of its outputs are the tensor's own."""


def apply_operation(source: Source, stored: mx.array) -> mx.array:
    """Return what a stored tensor stands for, lazy."""
    return OPERATIONS[source.operation](stored, source.turn.outputs)


def joined_slabs(
    names: Sequence[Sequence[str]], shapes: Sequence[Shape], *, whole: int
) -> tuple[list[Slab], Shape]:
    """Return where the bytes of stacks lie that are joined along their outputs, and their shape.

    names: of each stack's tensors. shapes: of each one's first. whole: a stack's dimensions, 3 of
    matrices and 2 of biases; a tensor of so many is a stack already.
    """
    stacks = [len(shape) == whole for shape in shapes]
    rows = sum(shape[-2] if whole == 3 else shape[-1] for shape in shapes)
    count = shapes[0][0] if stacks[0] else len(names[0])
    joined = (count, rows, *shapes[0][-1:][: whole - 2])
    if len(names) == 1:
        return [(name, None) for name in names[0]], joined
    slabs: list[Slab] = [
        (group[0], expert) if stack else (group[expert], None)
        for expert in range(count)
        for group, stack in zip(names, stacks, strict=True)
    ]
    return slabs, joined


def stack_of(parts: Sequence[mx.array], *, whole: int) -> mx.array:
    """Return slices as one array; a part of so many dimensions is a stack already."""
    return parts[0] if parts[0].ndim == whole else mx.stack(list(parts))
