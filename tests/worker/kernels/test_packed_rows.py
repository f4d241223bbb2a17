"""Few rows times a matrix of 4 bits by a kernel of our own: how it is cut, and what comes out."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.nvrtc import Device
from mlxd_worker.kernels.packed.rows import (
    INPUTS_MULTIPLE,
    STEP,
    TILE_ROWS,
    TILES,
    packed_rows_times,
    serves,
    tiles_for,
    tiling,
)
from mlxd_worker.kernels.switches import SWITCHES
from tests.support.packed_matrices import H200, Launches, check_products, matrix_of

T4_SHARED_NBYTES = 64 * 1024
COPYING_THREADS = 128
"""Threads that copy one tile's rows of one step, sixteen bytes each."""


@pytest.mark.parametrize("outputs", [32, 300, 4096, 6144, 28_672, 151_936])
def test_every_matrix_is_cut_whole(outputs: int) -> None:
    """Its steps are divided evenly, and a block's threads have all as much to copy."""
    for steps in range(2, 160, 2):
        cut = tiling(outputs, steps * STEP)
        assert steps % cut.splits == 0
        assert cut.threads <= 256
        assert cut.threads % COPYING_THREADS == 0
        at_once = cut.threads // COPYING_THREADS
        for tiles in TILES:
            assert tiles * cut.splits % at_once == 0
            assert tiles % at_once == 0 or at_once % tiles == 0


@pytest.mark.parametrize(
    ("rows", "shared_nbytes", "tiles"),
    [
        (1, H200.shared_nbytes, 1),
        (9, H200.shared_nbytes, 2),
        (32, H200.shared_nbytes, 4),
        (33, H200.shared_nbytes, 4),
        (128, H200.shared_nbytes, 4),
        (128, T4_SHARED_NBYTES, 2),
    ],
)
def test_a_block_has_the_rows_that_its_memory_holds(
    rows: int, shared_nbytes: int, tiles: int
) -> None:
    """Eight warps that divide wide inputs stage eight steps of each row, twice."""
    cut = tiling(4096, 14_336)

    assert cut.splits == 8
    assert tiles_for(rows, cut, shared_nbytes) == tiles
    assert cut.shared_nbytes(tiles) <= shared_nbytes


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 512), (4096, 4096), (20_000, 256)])
def test_a_launch_covers_all_rows_and_outputs(outputs: int, inputs: int, rows: int) -> None:
    """With no block too many, and within a block's memory."""
    launches = Launches()
    numbers, matrix = mx.zeros((rows, inputs), mx.bfloat16), matrix_of(outputs, inputs)
    result = packed_rows_times(numbers, matrix, device=H200, kernel=launches)

    (launched,) = launches.calls
    cut, constants = tiling(outputs, inputs), dict(launched["template"])
    blocks, tiled = launched["grid"][0] // cut.threads, constants["TILES"] * TILE_ROWS
    assert result.shape == (rows, outputs)
    assert launched["scalars"] == [rows]
    assert (blocks - 1) * cut.outputs < outputs <= blocks * cut.outputs
    assert (launched["grid"][1] - 1) * tiled < rows <= launched["grid"][1] * tiled
    assert launched["shared_memory"] == cut.shared_nbytes(constants["TILES"]) <= H200.shared_nbytes
    assert (constants["K"], constants["N"], constants["GROUP"]) == (inputs, outputs, 64)


def test_what_the_kernel_does_not_know_is_mlx_s() -> None:
    """Other types and widths, stacks of matrices, few outputs, other devices, and a switch."""
    rows, matrix = mx.zeros((2, 512), mx.bfloat16), matrix_of()
    narrow = INPUTS_MULTIPLE + STEP

    assert serves(rows, matrix, H200)
    assert not serves(rows.astype(mx.float32), matrix, H200)
    assert not serves(rows.astype(mx.float16), matrix, H200)
    assert not serves(rows[None], matrix, H200)
    assert not serves(rows, matrix_of(16), H200)
    assert not serves(mx.zeros((2, narrow), mx.bfloat16), matrix_of(256, narrow), H200)
    assert not serves(rows, matrix, Device(75, T4_SHARED_NBYTES))
    assert not serves(rows, matrix, Device(90, 0))
    with SWITCHES.without(FastPath.PACKED_ROWS):
        assert not serves(rows, matrix, H200)
    assert runs_cuda() or not serves(rows, matrix)


@pytest.mark.skipif(not runs_cuda(), reason="a kernel for CUDA")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(100, 1024), (4096, 1280), (1000, 14_336), (20_000, 1280)]
)
def test_the_kernel_agrees_with_the_numbers(
    outputs: int, inputs: int, group: int, dtype: mx.Dtype
) -> None:
    """Within rounding; and a row is the same to the bit, whatever rows stand beside it."""
    matrix = matrix_of(outputs, inputs, group=group, dtype=dtype)
    check_products(packed_rows_times, matrix, (1, 7, 9, 31, 33, 64, 65, 200))
