"""Many rows times a matrix of 4 bits by a kernel of our own: how it is cut, and what comes out."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.nvrtc import Device, find_device
from mlxd_worker.kernels.packed.blocks import (
    ADD_THREADS,
    ADD_VALUES,
    BLOCKS_MAX,
    ROWS_MIN,
    STAGE,
    packed_blocks_times,
    parts_of,
    serves_many,
)
from mlxd_worker.kernels.packed.blocks_source import (
    ARRANGE_THREADS,
    ARRANGE_VALUES,
    OUTPUTS,
    ROWS,
    THREADS,
)
from mlxd_worker.kernels.packed.product import kernel_for
from mlxd_worker.kernels.packed.rows import PackedMatrix, packed_rows_times
from tests.support.packed_matrices import H200, Launches, check_products, matrix_of


@pytest.mark.parametrize("outputs", [256, 1000, 4096, 6144, 28_672, 151_936])
def test_parts_are_whole_stages_and_run_at_once(outputs: int) -> None:
    """Where outputs alone are many blocks, there is one part."""
    blocks = -(-outputs // OUTPUTS)
    for stages in range(1, 80):
        parts = parts_of(outputs, stages * STAGE)
        assert stages % parts == 0
        assert parts == 1 or blocks * parts <= BLOCKS_MAX
        finer = (more for more in (2, 4, 8) if more > parts and stages % more == 0)
        assert all(blocks * more > BLOCKS_MAX for more in finer)


@pytest.mark.parametrize("rows", [33, 64, 65, 128, 129])
@pytest.mark.parametrize(("outputs", "inputs"), [(300, 512), (4096, 4096), (40_000, 256)])
def test_launches_cover_all_rows_outputs_and_inputs(outputs: int, inputs: int, rows: int) -> None:
    """With no block too many; parts of the inputs are float32 and are added by a launch more. Rows
    are laid out before, as many whole blocks as there are."""
    multiplying, arranging, adding = Launches(), Launches(), Launches()
    numbers, matrix = mx.zeros((rows, inputs), mx.bfloat16), matrix_of(outputs, inputs)
    result = packed_blocks_times(
        numbers, matrix, kernel=multiplying, arranging=arranging, adding=adding
    )

    (launched,) = multiplying.calls
    constants, parts = dict(launched["template"]), parts_of(outputs, inputs)
    wide, high, deep = launched["grid"]
    assert (result.shape, result.dtype) == ((rows, outputs), mx.bfloat16)
    assert launched["scalars"] == [rows]
    assert launched["threadgroup"] == (THREADS, 1, 1)
    assert (wide // THREADS - 1) * OUTPUTS < outputs <= wide // THREADS * OUTPUTS
    assert (high - 1) * constants["ROWS"] < rows <= high * constants["ROWS"]
    assert constants["ROWS"] == (64 if rows <= 64 else 128)
    assert (deep, constants["PARTS"]) == (parts, parts)
    assert (constants["K"], constants["N"], constants["GROUP"]) == (inputs, outputs, 64)
    assert launched["shared_memory"] <= H200.shared_nbytes
    (arranged,) = arranging.calls
    threads = arranged["grid"][0]
    assert (threads - ARRANGE_THREADS) * ARRANGE_VALUES < rows * inputs <= threads * ARRANGE_VALUES
    assert arranged["output_shapes"] == [(high * constants["ROWS"], inputs)]
    assert dict(arranged["template"])["ROWS"] == constants["ROWS"]
    if parts == 1:
        assert launched["output_dtypes"] == [mx.bfloat16]
        assert adding.calls == []
        return
    assert launched["output_shapes"] == [(parts, rows, outputs)]
    assert launched["output_dtypes"] == [mx.float32]
    (added,) = adding.calls
    threads = added["grid"][0]
    assert threads % ADD_THREADS == 0
    assert (threads - ADD_THREADS) * ADD_VALUES < rows * outputs <= threads * ADD_VALUES
    assert (dict(added["template"])["PARTS"], added["scalars"]) == (parts, [rows * outputs])


def test_few_rows_and_other_devices_and_widths_are_multiplied_otherwise() -> None:
    """By the kernel for few rows, or where that does not serve either, by MLX."""
    matrix = matrix_of()

    def choose(rows: int, of: PackedMatrix = matrix, device: Device | None = H200) -> object:
        numbers = mx.zeros((rows, of.words.shape[1] * 8), mx.bfloat16)
        return kernel_for(numbers, of, device)

    assert choose(ROWS_MIN) is packed_blocks_times
    assert choose(ROWS_MIN - 1) is packed_rows_times
    assert choose(ROWS_MIN, matrix_of(OUTPUTS - 4)) is packed_rows_times
    assert choose(ROWS_MIN, matrix_of(OUTPUTS + 2)) is packed_rows_times
    assert choose(ROWS_MIN, device=Device(100, H200.shared_nbytes)) is packed_rows_times
    assert choose(ROWS_MIN, device=Device(90, 200 * 1024)) is packed_rows_times
    assert choose(ROWS_MIN, device=Device(75, 64 * 1024)) is None
    assert choose(ROWS_MIN, device=None) is None
    assert not serves_many(matrix_of(256, 384), H200)


@pytest.mark.skipif(
    not runs_cuda() or find_device() != H200, reason="a kernel for Hopper's tensor cores"
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(256, 1024), (4096, 1280), (1000, 14_336), (20_000, 1280)]
)
def test_the_kernel_agrees_with_the_numbers(
    outputs: int, inputs: int, group: int, dtype: mx.Dtype
) -> None:
    """Within rounding; and a row is the same to the bit, whatever rows stand beside it."""
    matrix = matrix_of(outputs, inputs, group=group, dtype=dtype)
    check_products(packed_blocks_times, matrix, (1, 7, 33, 64, 65, 100, 128, 129, 200))


def test_every_block_size_is_whole_tiles_of_the_instruction() -> None:
    """Eight rows are the least that it knows; sixteen, that the weights of a group come at once."""
    assert all(rows % 16 == 0 and 128 % rows == 0 for rows in ROWS)
