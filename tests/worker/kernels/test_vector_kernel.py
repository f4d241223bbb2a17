"""One row times a matrix by a kernel of our own: how it is cut, and what comes out of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.vector import LOAD_VALUES, SHARED_WIDTH_MAX, Norm, row_times, tiling

WARP_THREADS = 32
THREADS_MAX = 512
"""With more, the registers that four loads of two rows take would not suffice."""


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("outputs", [1, 100, 4096, 28_672])
def test_every_width_is_cut_whole(outputs: int, *, normed: bool) -> None:
    """Whatever the width, a block's loads cover a row, each once, and its threads can run."""
    for steps in range(1, 128):
        inputs = steps * LOAD_VALUES
        if normed and inputs > SHARED_WIDTH_MAX:
            continue
        cut = tiling(outputs, inputs, normed=normed)
        assert cut.warps * WARP_THREADS <= THREADS_MAX
        assert WARP_THREADS % cut.rows == 0
        assert cut.groups or not normed
        if cut.groups:
            assert steps <= cut.loads * cut.warps < steps + cut.loads
        else:
            assert steps % cut.loads == 0


@pytest.mark.skipif(not runs_cuda(), reason="a kernel for CUDA")
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (3, 256),
        (9001, 1024),
        (1000, 3072),
        (4096, 5120),
        (100, 11_008),
        (4096, 14_336),
        (7, 18_944),
    ],
)
def test_the_kernel_agrees_with_separate_operations(outputs: int, inputs: int) -> None:
    """With a norm or without, a residual or a gate: within the rounding of sixteen bits."""
    keys = mx.random.split(mx.random.key(outputs + inputs), 4)
    matrix = (mx.random.normal((2 * outputs, inputs), key=keys[0]) / inputs**0.5).astype(
        mx.bfloat16
    )
    row = mx.random.normal((1, inputs), key=keys[1]).astype(mx.bfloat16)
    norm = Norm(mx.random.normal((inputs,), key=keys[2]).astype(mx.bfloat16), 1e-5)
    residual = mx.random.normal((1, outputs), key=keys[3]).astype(mx.bfloat16)
    exact = matrix.astype(mx.float32)
    plain = mx.sum(row.astype(mx.float32) * exact, axis=1)

    first = matrix[:outputs]
    assert _apart(row_times(row, first, wide=True), plain[:outputs]) < 1e-5
    added = plain[:outputs] + residual.astype(mx.float32)
    assert _apart(row_times(row, first, residual=residual), added) < 5e-3
    if inputs > SHARED_WIDTH_MAX:
        return
    weight = norm.weight.astype(mx.float32)
    normed = mx.sum(mx.fast.rms_norm(row.astype(mx.float32), weight, norm.eps) * exact, axis=1)
    assert _apart(row_times(row, first, norm=norm, wide=True), normed[:outputs]) < 1e-5
    gate, up = normed[:outputs], normed[outputs:]
    expected = gate * mx.sigmoid(gate) * up
    assert _apart(row_times(row, matrix, norm=norm, gated=True), expected) < 1e-2


def _apart(actual: mx.array, expected: mx.array) -> float:
    """Return the distance over the length of what is expected."""
    difference = actual.astype(mx.float32).reshape(-1) - expected
    apart: Any = (mx.linalg.norm(difference) / mx.linalg.norm(expected)).item()
    return float(apart)
