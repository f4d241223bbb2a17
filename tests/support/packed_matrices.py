"""Matrices of 4 bits for tests of kernels that multiply with them, and what these must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxd_worker.kernels.nvrtc import Device
from mlxd_worker.kernels.packed.rows import PackedMatrix

H200 = Device(90, 227 * 1024)
ERROR_MAX = 6e-3
"""Of all values together, by their norms."""


class Launches:
    """A kernel that computes nothing, and keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> list[mx.array]:
        """Note a launch."""
        self.calls.append(arguments)
        shaped = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shaped]


def matrix_of(
    outputs: int = 256, inputs: int = 512, *, group: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> PackedMatrix:
    """Return noise in 4 bits."""
    noise = mx.random.normal((outputs, inputs), key=mx.random.key(outputs + inputs)) / inputs**0.5
    return PackedMatrix(*mx.quantize(noise.astype(dtype), group, 4), group)


def check_products(
    multiply: Callable[[mx.array, PackedMatrix], mx.array],
    matrix: PackedMatrix,
    counts: Sequence[int],
) -> None:
    """Check products of so many rows: those of its numbers within rounding, and a row's the same to
    the bit whatever rows stand beside it.
    """
    numbers = mx.dequantize(matrix.words, matrix.scales, matrix.offsets, matrix.group_size, 4)
    shape = (max(counts), numbers.shape[1])
    rows = mx.random.normal(shape, key=mx.random.key(7)).astype(matrix.scales.dtype)
    expected = rows.astype(mx.float32) @ numbers.astype(mx.float32).T
    alone = multiply(rows[:1], matrix)
    for count in counts:
        ours = multiply(rows[:count], matrix)
        apart = mx.linalg.norm(ours.astype(mx.float32) - expected[:count])
        assert bool(apart < ERROR_MAX * mx.linalg.norm(expected[:count]))
        assert mx.array_equal(ours[:1], alone)
