"""Products with weights that stay packed, as MLX's kernels give them rightly, or ours faster.

MLX 0.32.4 on CUDA has a kernel of its own for integers of which one group is a whole row of inputs.
It is wrong from two rows on (compute capability 9.0; 64 of 64 and 128 of 128, 4 and 8 bits, any
type). Two groups of half the size with the same scale and offset say the same, and come out right.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlxd_worker.kernels.device import runs_cpu, runs_cuda
from mlxd_worker.kernels.nvrtc import Device
from mlxd_worker.kernels.packed.blocks import ROWS_MIN, packed_blocks_times, serves_many
from mlxd_worker.kernels.packed.rows import (
    BITS,
    PackedMatrix,
    device_here,
    packed_rows_times,
    serves,
    serves_matrix,
)
from mlxd_worker.kernels.packed.unpacking import serves_unpacking, unpack

Multiply = Callable[[mx.array, PackedMatrix], mx.array]

AFFINE = "affine"
HALVED = (64, 128)
"""Sizes of groups of integers that MLX has halves of."""

PACKED_ROWS_MAX = 128
"""More rows than this are multiplied faster by the unpacked weight, unpacking included: 14336 x
4096 in 4 bits on an H200, 203 against 219 us at 128 rows, 1155 against 439 us at 1024."""

BLOCK_ROWS_MAX = 512
"""The same where `packed_blocks_times` serves: the four products of a layer of an 8 B model one
after the other, on an H200, 841 against 902 us at 512 rows, 1526 against 1088 at 1024."""

PACKED_ROWS_MAX_CPU = 2
"""The same on a CPU, where the packed product is a loop over values."""


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
    many = rows.shape[0] >= ROWS_MIN and serves_many(matrix, device)
    return packed_blocks_times if many else packed_rows_times


def packed_rows_max(
    words: mx.array,
    scales: mx.array,
    offsets: mx.array | None,
    *,
    group_size: int,
    bits: int,
    mode: str = AFFINE,
) -> int:
    """Return up to how many rows the product with what is packed is the faster one here.

    Beyond, that with the numbers is (`unpack_weight`), unpacking included. Shapes as of
    `packed_product`.
    """
    if runs_cpu():
        return PACKED_ROWS_MAX_CPU
    if offsets is None or not has_four_bits(bits, mode):
        return PACKED_ROWS_MAX
    return rows_max_on(device_here(), PackedMatrix(words, scales, offsets, group_size))


def rows_max_on(device: Device | None, matrix: PackedMatrix) -> int:
    """Return the same of a matrix of 4 bits on a GPU; device: None where no kernel of ours runs."""
    if device is None or not serves_matrix(matrix, device) or not serves_many(matrix, device):
        return PACKED_ROWS_MAX
    return BLOCK_ROWS_MAX


def unpack_weight(
    words: mx.array,
    scales: mx.array,
    offsets: mx.array | None,
    *,
    dtype: mx.Dtype,
    group_size: int,
    bits: int,
    mode: str = AFFINE,
    global_scale: mx.array | None = None,
) -> mx.array:
    """Return packed matrices as numbers `[..., outputs, inputs]`; lazy.

    global_scale: as of `mx.dequantize`. Shapes as of `packed_product`.
    """
    if offsets is not None and has_four_bits(bits, mode) and global_scale is None:
        matrix = PackedMatrix(words, scales, offsets, group_size)
        if serves_unpacking(matrix, dtype, device_here()):
            return unpack(matrix)
    numbers = mx.dequantize(
        words,
        scales,
        offsets,
        group_size=group_size,
        bits=bits,
        mode=mode,
        global_scale=global_scale,
        dtype=dtype,
    )
    return numbers.astype(dtype)  # with a global scale MLX returns float32


def has_four_bits(bits: int, mode: str) -> bool:
    """Return whether kernels of ours may know integers that are packed so."""
    return bits == BITS and mode == AFFINE


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
        ours = kernel_for(rows, matrix, device_here()) if has_four_bits(bits, mode) else None
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
