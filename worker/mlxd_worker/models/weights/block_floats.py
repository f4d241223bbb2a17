"""Weights of 8-bit floats, one scale a square of them: read as numbers, a few rows at a time.

Invariants:
- A value is the float times its square's number; both are exact in float32, where they are
  multiplied, and the product is rounded once.
- No more than `PIECE_VALUES` are float32 at once, however large the weight.
"""

from collections.abc import Iterator
from typing import Final

import mlx.core as mx

from mlxd_models.families.common.packing import Packing

PIECE_VALUES: Final = 1 << 20


def numbers_of_blocks(
    weight: mx.array, scales: mx.array, packing: Packing, *, dtype: mx.Dtype
) -> Iterator[mx.array]:
    """Yield pieces, lazy, that joined along the axis before the last are `[..., outputs, inputs]`.

    weight: uint8 of that shape. scales: `[..., squares, squares]`, the last of them cut off where
    the weight ends. Each piece is to be evaluated before the next one is asked for.
    """
    *stack, outputs, inputs = weight.shape
    height, width = packing.block_rows, packing.group_size
    values = inputs
    for size in stack:
        values *= size
    rows = max(PIECE_VALUES // max(values, 1) // height, 1) * height
    for first in range(0, outputs, rows):
        count = min(rows, outputs - first)
        plain = mx.from_fp8(weight[..., first : first + count, :], dtype=mx.float32)
        squares = scales[..., first // height : -(-(first + count) // height), :]
        spread = mx.repeat(squares.astype(mx.float32), width, axis=-1)[..., :inputs]
        spread = mx.repeat(spread, height, axis=-2)[..., :count, :]
        yield (plain * spread).astype(dtype)
