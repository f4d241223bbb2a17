"""What makes tensors of those that are stored in their place: an array function an operation.

Invariants:
- All of them are lazy: nothing is read before what is made is evaluated.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import mlx.core as mx

from mlxd_models.families.common.packing import NVFP4_FULL_SCALE
from mlxd_models.families.common.tensors import Operation, Source

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
