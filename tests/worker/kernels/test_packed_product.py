"""Products with packed weights of one group a row, which a kernel of CUDA gets wrong."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_worker.kernels.packed.product import Groups, in_halves, packed_product

OUTPUTS = 256


def random(*shape: int, seed: int) -> mx.array:
    """Return noise."""
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 128])
def test_one_group_is_two_of_half_the_size(group: int, bits: int) -> None:
    """The same numbers come out, to the last bit."""
    words, scales, offsets = mx.quantize(random(OUTPUTS, group, seed=1), group, bits)
    halves = in_halves(Groups(scales, offsets, group))

    assert (halves.size, halves.scales.shape) == (group // 2, (OUTPUTS, 2))
    assert mx.array_equal(
        mx.dequantize(words, halves.scales, halves.offsets, halves.size, bits),
        mx.dequantize(words, scales, offsets, group, bits),
    )


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 128])
def test_a_product_is_what_the_numbers_give(group: int, bits: int, rows: int) -> None:
    """One matrix and several, on whatever device this runs."""
    words, scales, offsets = mx.quantize(random(2, OUTPUTS, group, seed=2), group, bits)
    numbers = mx.dequantize(words, scales, offsets, group, bits)
    rows_given = random(2, rows, group, seed=3)

    many = packed_product(
        rows_given, words, scales, offsets, transpose=True, group_size=group, bits=bits
    )
    one = packed_product(
        rows_given[0], words[0], scales[0], offsets[0], transpose=True, group_size=group, bits=bits
    )

    expected = rows_given @ numbers.swapaxes(-1, -2)
    assert mx.allclose(many, expected, rtol=1e-4, atol=1e-3)
    assert mx.allclose(one, expected[0], rtol=1e-4, atol=1e-3)
