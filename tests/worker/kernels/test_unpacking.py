"""Matrices of 4 bits as numbers, by a kernel of our own: which, and what comes out."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import runs_cpu, runs_cuda
from mlxd_worker.kernels.nvrtc import Device, find_device
from mlxd_worker.kernels.packed.blocks import packed_blocks_times
from mlxd_worker.kernels.packed.product import (
    BLOCK_ROWS_MAX,
    PACKED_ROWS_MAX,
    PACKED_ROWS_MAX_CPU,
    has_four_bits,
    packed_rows_max,
    rows_max_on,
    unpack_weight,
)
from mlxd_worker.kernels.packed.rows import PackedMatrix
from mlxd_worker.kernels.packed.unpacking import THREADS, serves_unpacking, unpack
from mlxd_worker.kernels.switches import SWITCHES
from tests.support.packed_matrices import H200, Launches, matrix_of

NEEDS_HOPPER = pytest.mark.skipif(
    not runs_cuda() or find_device() != H200, reason="a kernel for Hopper's tensor cores"
)
ROUNDING = 2.0**-7
"""Of a number in bfloat16, and the one that MLX makes of the same integer."""


@pytest.mark.parametrize("shape", [(256, 512), (3, 256, 512), (1, 64)])
def test_a_launch_covers_each_word_once(shape: tuple[int, ...]) -> None:
    """Of one matrix or of a stack of them."""
    launches = Launches()
    packed = mx.quantize(mx.zeros(shape, mx.bfloat16), 64, 4)
    numbers = unpack(PackedMatrix(*packed, 64), kernel=launches)

    (launched,) = launches.calls
    words, threads = packed[0].size, launched["grid"][0]
    assert (numbers.shape, numbers.dtype) == (shape, mx.bfloat16)
    assert launched["scalars"] == [words]
    assert threads % THREADS == 0
    assert threads - THREADS < words <= threads


def test_other_types_packings_and_devices_are_unpacked_by_mlx() -> None:
    """Whatever the kernel does not know, and all of them where its path is off."""
    matrix = matrix_of()

    def serves(of: PackedMatrix = matrix, device: Device | None = H200) -> bool:
        return serves_unpacking(of, mx.bfloat16, device)

    assert serves()
    assert not serves(device=None)
    assert not serves(device=Device(75, 64 * 1024))
    assert not serves(matrix_of(dtype=mx.float16))
    assert not serves(replace(matrix, group_size=16))
    assert not serves_unpacking(matrix_of(dtype=mx.float32), mx.float32, H200)
    with SWITCHES.without(FastPath.PACKED_ROWS):
        assert not serves()
    assert has_four_bits(4, "affine")
    assert not has_four_bits(8, "affine")
    assert not has_four_bits(4, "mxfp4")


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "nvfp4")])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_numbers_are_those_of_mlx(bits: int, mode: str, dtype: mx.Dtype) -> None:
    """Within the rounding of the type: MLX rounds twice, and a kernel of ours once."""
    size = 16 if mode == "nvfp4" else 64
    plain = mx.random.normal((128, 256), key=mx.random.key(5)).astype(dtype)
    words, scales, *rest = mx.quantize(plain, size, bits, mode=mode)
    offsets = rest[0] if rest else None
    expected = mx.dequantize(words, scales, offsets, size, bits, mode=mode, dtype=dtype)
    numbers = unpack_weight(
        words, scales, offsets, dtype=dtype, group_size=size, bits=bits, mode=mode
    )

    assert (numbers.dtype, numbers.shape) == (dtype, plain.shape)
    apart = mx.abs(numbers.astype(mx.float32) - expected.astype(mx.float32))
    assert bool(mx.all(apart <= ROUNDING * mx.max(mx.abs(plain))))


@pytest.mark.parametrize(
    ("device", "outputs", "most"),
    [
        (H200, 256, BLOCK_ROWS_MAX),
        (H200, 128, PACKED_ROWS_MAX),
        (Device(100, H200.shared_nbytes), 256, PACKED_ROWS_MAX),
        (Device(75, H200.shared_nbytes), 256, PACKED_ROWS_MAX),
        (None, 256, PACKED_ROWS_MAX),
    ],
)
def test_more_rows_stay_packed_where_a_kernel_for_many_serves(
    device: Device | None, outputs: int, most: int
) -> None:
    """By the device and the matrix: MLX's own products are slow from far fewer on."""
    assert rows_max_on(device, matrix_of(outputs)) == most


@pytest.mark.skipif(not runs_cpu(), reason="what a CPU does")
def test_on_a_cpu_hardly_any_rows_are_multiplied_packed() -> None:
    """There the packed product is a loop over values."""
    matrix = matrix_of()
    parts = (matrix.words, matrix.scales, matrix.offsets)
    assert packed_rows_max(*parts, group_size=64, bits=4) == PACKED_ROWS_MAX_CPU


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_numbers_are_those_that_packed_products_multiply(group: int, dtype: mx.Dtype) -> None:
    """To the bit: a product with a row that is one at one input says which number is there."""
    matrix = matrix_of(512, 512, group=group, dtype=dtype)
    numbers = unpack(matrix)

    assert mx.array_equal(packed_blocks_times(mx.eye(512, dtype=dtype), matrix).T, numbers)
    parts = (matrix.words, matrix.scales, matrix.offsets)
    words, scales, offsets = (mx.stack([part, part]) for part in parts)
    stacked = PackedMatrix(words, scales, offsets, group)
    assert mx.array_equal(unpack(stacked), mx.stack([numbers, numbers]))
