"""A whole matrix of 4 bits as numbers, for products of more rows than stay packed: on CUDA.

MLX 0.32.4 writes them at a quarter of an H200's memory speed: 280 us for 28672 x 4096, whose bytes
a copy moves in 80.

Invariants:
- An integer becomes the number that the kernels for packed products make of it, to the bit.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import HALVES, Kernel
from mlxd_worker.kernels.nvrtc import Device
from mlxd_worker.kernels.own import Body, OwnKernel
from mlxd_worker.kernels.packed.rows import (
    CAPABILITY_MIN,
    GROUP_SIZES,
    WORD_VALUES,
    PackedMatrix,
)
from mlxd_worker.kernels.packed.rows_source import HEADER
from mlxd_worker.kernels.switches import SWITCHES

THREADS: Final = 256
"""Of a block; each unpacks a word."""

_TEXT: Final = """
  const size_t word = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (word < count) {
    const size_t group = word / (GROUP / 8);
    unsigned pairs[4];
    unpack<T>(
        words[word], Halves<T>::twice(scales[group]), Halves<T>::twice(offsets[group]), pairs);
    reinterpret_cast<uint4*>(out)[word] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
"""


def serves_unpacking(matrix: PackedMatrix, dtype: mx.Dtype, device: Device | None) -> bool:
    """Return whether `unpack` can make numbers of a type on a device; otherwise MLX does."""
    if device is None or not SWITCHES.is_on(FastPath.PACKED_ROWS):
        return False
    alike = dtype in HALVES and dtype == matrix.scales.dtype == matrix.offsets.dtype
    return alike and matrix.group_size in GROUP_SIZES and device.capability >= CAPABILITY_MIN


def unpack(matrix: PackedMatrix, *, kernel: Kernel | None = None) -> mx.array:
    """Return matrices [..., N, K / 8 words] as numbers [..., N, K] of their scales' type; lazy.

    kernel: what is launched; None: this process's.
    """
    *stack, words = matrix.words.shape
    count = matrix.words.size
    (numbers,) = (kernel or _kernel())(
        inputs=[matrix.words, matrix.scales, matrix.offsets],
        output_shapes=[(*stack, words * WORD_VALUES)],
        output_dtypes=[matrix.scales.dtype],
        grid=(-(-count // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[("T", matrix.scales.dtype), ("GROUP", matrix.group_size)],
        scalars=[count],
    )
    return numbers


@cache
def _kernel() -> OwnKernel:
    inputs = ("words", "scales", "offsets")
    return OwnKernel(Body("unpack_words", inputs, ("out",), _TEXT, HEADER, ("count",)))
