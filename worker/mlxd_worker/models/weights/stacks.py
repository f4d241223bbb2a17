"""Stacks of experts' matrices, or of their biases, however a checkpoint cuts them.

Invariants:
- A stack is one tensor, or as many as there are experts, in their order.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlxd_worker.models.weights.lazy_tensors import Slab

Shape = tuple[int, ...]


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
