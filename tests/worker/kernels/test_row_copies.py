"""Rows copied by kernels: to the bit, to their own place, and nowhere else."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.picking import pick
from mlxd_worker.kernels.row_copies import Range, copy_range, put_range, serves

SLOTS, HEADS, LENGTH, WIDTH = 3, 2, 300, 64


def arena(seed: int) -> mx.array:
    """Return `[slots, heads, length, width]` of random numbers."""
    shape = (SLOTS, HEADS, LENGTH, WIDTH)
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)


@pytest.mark.skipif(not runs_cuda(), reason="a kernel for CUDA")
@pytest.mark.parametrize(("start", "count"), [(0, 1), (7, 130), (0, LENGTH)])
def test_a_range_is_copied_out_and_put_elsewhere(start: int, count: int) -> None:
    """Every head's positions, with what was there before on both sides."""
    keys, values = arena(1), arena(2)
    mx.eval(keys, values)
    copies = copy_range(Range(keys, values, slot=1, start=start), count)
    before = [mx.array(array) for array in (keys, values)]
    mx.eval(copies, before)
    target = Range(keys, values, slot=2, start=LENGTH - count)
    mx.eval(put_range(Range(*copies, slot=0, start=0), target, count))

    for now, was, copied in zip((keys, values), before, copies, strict=True):
        assert bool(mx.array_equal(copied[0], was[1, :, start : start + count]))
        assert bool(mx.array_equal(now[2, :, LENGTH - count :], copied[0]))
        assert bool(mx.array_equal(now[2, :, : LENGTH - count], was[2, :, : LENGTH - count]))
        assert bool(mx.array_equal(now[:2], was[:2]))


def test_no_kernel_serves_what_it_cannot_copy() -> None:
    """Widths that 16 bytes do not divide, keys and values of two widths, other types."""
    half = mx.bfloat16
    assert not serves(head_dim=60, value_dim=60, dtype=half)
    assert not serves(head_dim=64, value_dim=128, dtype=half)
    assert not serves(head_dim=64, value_dim=64, dtype=mx.float32)
    assert serves(head_dim=64, value_dim=64, dtype=half) == runs_cuda()


@pytest.mark.parametrize("ids_dtype", [mx.uint32, mx.int32, mx.int64])
def test_values_are_picked_by_their_indices(ids_dtype: mx.Dtype) -> None:
    """By a kernel or without one, of each row its own, twice the same if asked."""
    values = mx.arange(12, dtype=mx.float32).reshape(2, 6)
    ids = mx.array([[5, 0, 0], [1, 1, 3]]).astype(ids_dtype)

    assert pick(values, ids).tolist() == [[5.0, 0.0, 0.0], [7.0, 7.0, 9.0]]
