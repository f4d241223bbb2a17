"""A wrong product with packed weights is found, and named by what one would load with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.common.packing import ON_LOAD, Packing
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.domain.requests import Weights
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.nvrtc import Device
from mlxd_worker.kernels.packed.blocks import packed_blocks_times
from mlxd_worker.kernels.packed.product import kernel_for, packed_product, unpack_weight
from mlxd_worker.kernels.packed.rows import PackedMatrix, packed_rows_times
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.proof.judging import Result
from mlxd_worker.proof.products import (
    OUTPUTS,
    ROWS,
    WIDTH,
    compare_products,
    describe_packing,
    packings,
)
from mlxd_worker.proof.prover import Prover

pytestmark = pytest.mark.skipif(not runs_cpu(), reason="numbers are judged as a CPU's here")


def prove(multiply: Callable[..., mx.array] = packed_product) -> list[Result]:
    """Return what all packings come to."""
    results: list[Result] = []
    compare = partial(compare_products, multiply=multiply)
    Prover(results.append, lambda _: None).prove_products(DeviceKind.CPU, compare=compare)
    return results


def test_sound_products_pass() -> None:
    """Every packing there is, those of each `--weights` among them."""
    results = prove()

    assert [result.problem for result in results] == [""] * len(results)
    assert len(results) == len({result.subject for result in results}) == len(list(packings()))
    assert all(recipe.common in packings() for recipe in ON_LOAD.values())
    assert any("mixed_4_8" in result.subject for result in results)


def test_a_kernel_of_our_own_is_switched_off_where_products_are_right_without() -> None:
    """It alone is to blame then; what is proved later is what a worker will run."""

    def multiply(rows: mx.array, *weight: mx.array | None, **layout: Any) -> mx.array:
        out = packed_product(rows, *weight, **layout)  # type: ignore[arg-type]
        return -out if SWITCHES.is_on(FastPath.PACKED_ROWS) else out

    with SWITCHES.without():
        results = prove(multiply)
        assert not SWITCHES.is_on(FastPath.PACKED_ROWS)

    faults = [result for result in results if result.problem]
    assert [fault.off for fault in faults] == [FastPath.PACKED_ROWS]
    assert faults == results[:1]


@pytest.mark.parametrize("factor", [1.1, math.nan])
def test_numbers_that_are_wrong_are_found(factor: float) -> None:
    """A pass of many rows multiplies with them."""

    def unpack(*weight: mx.array | None, **layout: Any) -> mx.array:
        return unpack_weight(*weight, **layout) * factor  # type: ignore[arg-type]

    packing = ON_LOAD[Weights.Q4].common
    problem = compare_products(packing, DeviceKind.CPU, unpack=unpack)

    assert problem is not None
    assert problem.startswith("numbers of 64 inputs are off by up to")
    assert compare_products(packing, DeviceKind.CPU) is None


@pytest.mark.parametrize("spoil", [lambda out: mx.roll(out, 1, -1), lambda out: out * math.nan])
def test_a_kernel_that_is_wrong_for_some_rows(
    spoil: Callable[[mx.array], mx.array],
) -> None:
    """As one of MLX 0.32.4 is from two rows on; other packings are fine."""
    recipe = ON_LOAD[Weights.MIXED_4_8]
    wrong = recipe.finer
    assert wrong is not None

    def multiply(rows: mx.array, *weight: mx.array | None, **layout: Any) -> mx.array:
        out = packed_product(rows, *weight, **layout)  # type: ignore[arg-type]
        is_wrong = (layout["group_size"], layout["bits"]) == (wrong.group_size, wrong.bits)
        return spoil(out) if is_wrong and len(rows) > 1 else out

    faults = [result for result in prove(multiply) if result.problem]

    assert [(fault.subject, fault.off) for fault in faults] == [(describe_packing(wrong), None)]
    assert faults[0].subject.endswith("--weights q8, mixed_4_8")
    assert faults[0].problem.startswith("2 rows of 64 inputs are off")


def test_both_kernels_for_4_bits_are_reached() -> None:
    """On a Hopper device one or the other multiplies each number of rows that is proved."""
    packing = Packing(64, 4)
    weight = mx.random.normal((OUTPUTS, WIDTH)).astype(mx.bfloat16)
    words, scales, offsets = mx.quantize(weight, packing.group_size, packing.bits)
    matrix = PackedMatrix(words, scales, offsets, packing.group_size)
    device = Device(90, 227 * 1024)
    kernels = {kernel_for(mx.zeros((count, WIDTH), mx.bfloat16), matrix, device) for count in ROWS}

    assert kernels == {packed_rows_times, packed_blocks_times}
