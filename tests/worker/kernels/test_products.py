"""Several rows times a small matrix by a kernel of our own: how it is cut, and what comes out."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import pytest

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.nvrtc import Device, find_device
from mlxd_worker.kernels.products import (
    BLOCKS_MIN,
    NBYTES_MAX,
    ROWS_MAX,
    block_rows_of,
    is_served,
    own_nbytes_max,
    rows_times,
    runs_here,
    runs_on,
)
from mlxd_worker.kernels.products_source import (
    OUTPUTS,
    ROWS,
    STAGE,
    STAGES,
    THREADS,
    shared_nbytes,
)
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.weights.fused import (
    add_projection,
    gate_projection,
    logits_of,
    normed_times,
)
from mlxd_worker.models.weights.linear import Linear
from tests.support.counting import calls_of
from tests.support.packed_matrices import H200, Launches

COUNTS = (2, 3, 16, 17, 33, 64, 100, 128, 129, 200, 256)
ERROR_MAX = {mx.bfloat16: 6e-3, mx.float16: 1e-3}
"""Of all values together, by their norms: their rounding."""

on_hopper = pytest.mark.skipif(
    not runs_cuda() or find_device() != H200, reason="a kernel for Hopper's tensor cores"
)


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("outputs", [64, 1024, 6144])
@pytest.mark.parametrize("gated", [False, True])
def test_launches_cover_all_rows_and_outputs(outputs: int, rows: int, *, gated: bool) -> None:
    """With no block too many; gated, half of the outputs are what comes out."""
    launches = Launches()
    numbers, matrix = mx.zeros((rows, 128), mx.bfloat16), mx.zeros((outputs, 128), mx.bfloat16)
    yielded = outputs // 2 if gated else outputs

    result = rows_times(numbers, matrix, gated=gated, kernel=launches)

    (launched,) = launches.calls
    constants = dict(launched["template"])
    wide, high, deep = launched["grid"]
    assert (result.shape, result.dtype) == ((rows, yielded), mx.bfloat16)
    assert launched["scalars"] == [rows, yielded, 128]
    assert launched["threadgroup"] == (THREADS, 1, 1)
    assert (wide, deep) == (outputs // OUTPUTS * THREADS, 1)
    assert (high - 1) * constants["ROWS"] < rows <= high * constants["ROWS"]
    assert (constants["GATED"], constants["ADDED"]) == (gated, False)
    assert launched["shared_memory"] == shared_nbytes(constants["ROWS"]) <= H200.shared_nbytes


def test_a_residual_is_added_and_a_wide_result_is_float32() -> None:
    """Each is another kernel."""
    launches = Launches()
    numbers, matrix = mx.zeros((4, 64), mx.float16), mx.zeros((64, 64), mx.float16)

    rows_times(numbers, matrix, residual=mx.ones((4, 64), mx.float16), kernel=launches)
    wide = rows_times(numbers, matrix, wide=True, kernel=launches)

    added, plain = launches.calls
    assert len(added["inputs"]) == 3
    assert dict(added["template"])["ADDED"] is True
    assert len(plain["inputs"]) == 2
    assert (wide.dtype, dict(plain["template"])["OUT"]) == (mx.float32, mx.float32)


@pytest.mark.parametrize("tiles", [1, 3, 16, 32, 96, 200])
def test_a_block_has_as_many_rows_as_leave_enough_blocks(tiles: int) -> None:
    """And no more than there are, rounded up to what an instruction takes."""
    for rows in range(2, ROWS_MAX + 1):
        size = block_rows_of(rows, tiles)
        larger = [other for other in ROWS if other > size]
        assert size == min(ROWS) or size // 2 < rows
        assert size == min(ROWS) or tiles * -(-rows // size) >= BLOCKS_MIN
        for other in larger:
            assert size >= rows or tiles * -(-rows // other) < BLOCKS_MIN


def test_what_a_stage_has_is_whole_patterns() -> None:
    """A block's threads copy whole rows, and every stage begins where a pattern does."""
    assert STAGE * 2 == 128
    assert all(rows % (THREADS // 8) == 0 for rows in ROWS)
    assert all((OUTPUTS + rows) * 128 % 1024 == 0 for rows in ROWS)
    assert STAGES > 3  # one read, one that may still be, and one that comes


def test_other_rows_matrices_and_devices_are_multiplied_otherwise() -> None:
    """By MLX, or a single row by its own kernel."""

    def serve(
        rows: int = 8,
        outputs: int = 128,
        inputs: int = 256,
        dtype: mx.Dtype = mx.bfloat16,
        rows_dtype: mx.Dtype | None = None,
    ) -> bool:
        numbers = mx.zeros((rows, inputs), rows_dtype or dtype)
        return is_served(numbers, mx.zeros((outputs, inputs), dtype))

    assert serve()
    assert serve(rows=ROWS_MAX)
    assert serve(dtype=mx.float16)
    assert serve(outputs=NBYTES_MAX // 512)
    assert not serve(rows=1)
    assert not serve(rows=ROWS_MAX + 1)
    assert not serve(outputs=NBYTES_MAX // 512 + OUTPUTS)
    assert not serve(outputs=96)
    assert not serve(inputs=96)
    assert not serve(dtype=mx.float32)
    assert not serve(rows_dtype=mx.float16)
    assert not is_served(mx.zeros((8, 1, 256), mx.bfloat16), mx.zeros((128, 256), mx.bfloat16))
    assert not is_served(mx.zeros((8, 128), mx.bfloat16), mx.zeros((128, 256), mx.bfloat16))
    assert runs_on(H200)
    assert not runs_on(Device(100, H200.shared_nbytes))
    assert not runs_on(Device(90, 100 * 1024))


def test_it_can_be_switched_off() -> None:
    """As every fast path; on a CPU it never is on."""
    with SWITCHES.without(FastPath.ROWS_KERNEL):
        assert not runs_here()
        assert own_nbytes_max() == 0
    assert runs_here() <= runs_cuda()
    assert own_nbytes_max() == (NBYTES_MAX if runs_here() else 0)


@on_hopper
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        *((64, stages * STAGE) for stages in range(1, STAGES + 3)),
        (192, 128),
        (1024, 1024),
        (1024, 3072),
        (6144, 1024),
        (2048, 896),
    ],
)
def test_the_kernel_agrees_with_the_numbers(outputs: int, inputs: int, dtype: mx.Dtype) -> None:
    """Within rounding, with a residual or a gate as without; a row's bits are its own alone."""
    keys = mx.random.split(mx.random.key(outputs + inputs), 3)
    matrix = (mx.random.normal((outputs, inputs), key=keys[0]) / inputs**0.5).astype(dtype)
    rows = mx.random.normal((max(COUNTS), inputs), key=keys[1]).astype(dtype)
    residual = mx.random.normal((max(COUNTS), outputs), key=keys[2]).astype(dtype)
    exact = mx.sum(rows.astype(mx.float32)[:, None] * matrix.astype(mx.float32)[None, :64], axis=2)
    whole = rows.astype(mx.float32) @ matrix.astype(mx.float32).T
    gates, ups = whole[:, : outputs // 2], whole[:, outputs // 2 :]
    whole_results: dict[str, mx.array] = {}
    for count in reversed(COUNTS):
        some = rows[:count]
        results = {
            "wide": (rows_times(some, matrix, wide=True)[:, :64], exact),
            "plain": (rows_times(some, matrix)[:, :64], exact),
            "added": (rows_times(some, matrix, residual=residual[:count]), whole + residual),
            "gated": (rows_times(some, matrix, gated=True), gates * mx.sigmoid(gates) * ups),
        }
        for name, (ours, expected) in results.items():
            error = _apart(ours, expected[:count])
            # TF32 may have made what the last two are compared with.
            assert error < (1e-5 if name == "wide" else ERROR_MAX[dtype]), (name, count)
            assert mx.array_equal(ours, whole_results.setdefault(name, ours)[:count]), (name, count)


@on_hopper
def test_layers_take_it_and_say_the_same_without() -> None:
    """Each of a layer's products, and the head's."""
    assert runs_here()
    keys = mx.random.split(mx.random.key(3), 5)
    rows = mx.random.normal((5, 256), key=keys[0]).astype(mx.bfloat16)
    norm = Norm(mx.random.normal((256,), key=keys[1]).astype(mx.bfloat16), 1e-5)
    square, wide = (
        Linear((mx.random.normal(shape, key=key) / 16).astype(mx.bfloat16)).turn_once()
        for shape, key in (((256, 256), keys[2]), ((1024, 256), keys[3]))
    )

    def results() -> list[mx.array]:
        return [
            normed_times(rows, norm, wide),
            add_projection(rows, rows, square),
            gate_projection(rows, norm, wide, width=512),
            logits_of(rows, wide),
        ]

    assert calls_of(results, rows_times) == 4
    ours = results()
    with SWITCHES.without(FastPath.ROWS_KERNEL):
        for mine, other in zip(ours, results(), strict=True):
            assert mine.dtype == other.dtype
            assert _apart(mine, other.astype(mx.float32)) < 1e-2


def _apart(ours: mx.array, expected: mx.array) -> float:
    error = mx.linalg.norm(ours.astype(mx.float32) - expected) / mx.linalg.norm(expected)
    return cast("float", error.item())
