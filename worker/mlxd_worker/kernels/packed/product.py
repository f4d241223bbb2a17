"""Products with weights that stay packed, as MLX's kernels give them rightly.

MLX 0.32.4 on CUDA has a kernel of its own for integers of which one group is a whole row of inputs.
It is wrong from two rows on (compute capability 9.0; 64 of 64 and 128 of 128, 4 and 8 bits, any
type). Two groups of half the size with the same scale and offset say the same, and come out right.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.nvrtc import Device
from mlxd_worker.kernels.packed.blocks import packed_blocks_times, serves_blocks
from mlxd_worker.kernels.packed.rows import (
    BITS,
    PackedMatrix,
    device_here,
    packed_rows_times,
    serves,
)

Multiply = Callable[[mx.array, PackedMatrix], mx.array]

AFFINE = "affine"
HALVED = (64, 128)
"""Sizes of groups of integers that MLX has halves of."""


class Groups(NamedTuple):
    """The scales of packed integers, and how many integers share one."""

    scales: mx.array
    """[..., outputs, groups]."""
    offsets: mx.array
    """The same shape."""
    size: int


def in_halves(groups: Groups) -> Groups:
    """Return one group a row as two of half the size; copied: these kernels read no views."""
    scales, offsets = (
        mx.contiguous(mx.repeat(array, 2, axis=-1)) for array in (groups.scales, groups.offsets)
    )
    return Groups(scales, offsets, groups.size // 2)


def kernel_for(rows: mx.array, matrix: PackedMatrix, device: Device | None) -> Multiply | None:
    """Return which kernel of ours multiplies rows with a matrix of 4 bits; None: MLX's own."""
    if device is None or not serves(rows, matrix, device):
        return None
    return packed_blocks_times if serves_blocks(rows, matrix, device) else packed_rows_times


def packed_product(
    rows: mx.array,
    words: mx.array,
    scales: mx.array,
    offsets: mx.array | None,
    *,
    transpose: bool,
    group_size: int,
    bits: int,
    mode: str = AFFINE,
) -> mx.array:
    """Return `rows` times packed matrices, or times their transposes; lazy.

    Shapes as of `mx.quantized_matmul`: words `[..., outputs, words]`, scales and offsets
    `[..., outputs, groups]`, rows `[..., M, inputs]`, where `transpose`.
    """
    if runs_cuda() and offsets is not None and transpose and mode == AFFINE:
        matrix = PackedMatrix(words, scales, offsets, group_size)
        ours = kernel_for(rows, matrix, device_here()) if bits == BITS else None
        if ours is not None:
            return ours(rows, matrix)
        if scales.shape[-1] == 1 and group_size in HALVED:
            scales, offsets, group_size = in_halves(Groups(scales, offsets, group_size))
    return mx.quantized_matmul(
        rows,
        words,
        scales,
        offsets,
        transpose=transpose,
        group_size=group_size,
        bits=bits,
        mode=mode,
    )
