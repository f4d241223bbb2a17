"""Packed weights as numbers and numbers packed, a piece at a time.

Invariants:
- Either way MLX takes several arrays of the weight's size: of a piece, here, and not of the whole.
- What is made does not depend on how it is cut: no group is in two pieces.
- A value of 8-bit floats is the float times its square's number; both are exact in float32, where
  they are multiplied, and the product is rounded once.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import mlx.core as mx

from mlxd_models.families.common.packing import Packing
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.machine.lanes import lanes
from mlxd_worker.models.weights.linear import PackedWeight, layout_of

PIECES_VALUES: Final = 1 << 19
"""How many values are unpacked at once, by all lanes together: more cores take no more memory."""

PACKED_VALUES: Final = 1 << 15
"""The same while packing, which takes more than forty bytes for each value of small floats."""

PACKED_VALUES_GPU: Final = 1 << 20
"""The same on a GPU, where each piece is a wait: 64 us, of 8 B values 14 s in pieces as above."""

BLOCK_VALUES: Final = 1 << 20
"""The most of 8-bit floats that are float32 at once, however large the weight."""


def numbers_of(
    packed: PackedWeight,
    *,
    exact_in: mx.Dtype,
    dtype: mx.Dtype,
    streams: Sequence[mx.Stream] | None = None,
) -> mx.array:
    """Return `[..., inputs]` as `dtype`, evaluated, reckoned in `exact_in`.

    packed: evaluated. streams: those of all lanes.
    """
    inputs = packed.scales.shape[-1] * packed.packing.group_size
    rows = packed.scales.size // packed.scales.shape[-1]
    flat = packed.cut(lambda array: array.reshape(rows, -1))
    scale = None if packed.global_scale is None else packed.global_scale.reshape(-1)

    def piece(owner: int, part: slice) -> mx.array:
        own = replace(
            flat.cut(lambda array: array[part]),
            global_scale=None if scale is None else scale[owner],
        )
        return own.numbers(exact_in).astype(dtype)

    height = rows if scale is None else rows // scale.size
    streams = lanes() if streams is None else streams
    step = max(PIECES_VALUES // len(streams) // inputs, 1)
    parts = [
        (top // height, slice(first, min(first + step, top + height)))
        for top in range(0, rows, height)
        for first in range(top, top + height, step)
    ]
    whole = mx.zeros((rows, inputs), dtype)
    for first in range(0, len(parts), len(streams)):
        pieces = []
        for (owner, part), stream in zip(parts[first:], streams, strict=False):
            with mx.stream(stream):
                pieces.append((part, piece(owner, part)))
        for part, numbers in pieces:
            whole[part] = numbers
        # Whatever is not waited for is there at once.
        mx.eval(whole)
    return whole.reshape(*packed.words.shape[:-1], inputs)


def packed_of(plain: mx.array, packing: Packing) -> tuple[mx.array, ...]:
    """Return a weight's words, scales and, where there are any, offsets, evaluated.

    plain: evaluated, `[outputs, inputs]` or `[experts, outputs, inputs]`.
    """
    *stack, outputs, inputs = plain.shape
    step = max((PACKED_VALUES if runs_cpu() else PACKED_VALUES_GPU) // inputs, 1)
    rows = [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)]
    places: list[tuple[int | slice, ...]] = [(part,) for part in rows]
    if stack:
        places = [(expert, part) for expert in range(stack[0]) for part in rows]
    whole: list[mx.array] = []
    for place in places:
        packed = mx.quantize(plain[place], **layout_of(packing))
        if not whole:
            whole = [mx.zeros((*stack, outputs, part.shape[-1]), part.dtype) for part in packed]
        for array, part in zip(whole, packed, strict=True):
            array[place] = part
        del part, packed
        mx.eval(whole)
    return tuple(whole)


def numbers_of_blocks(
    weight: mx.array, scales: mx.array, packing: Packing, *, dtype: mx.Dtype
) -> Iterator[mx.array]:
    """Yield pieces, lazy, that joined along the axis before the last are `[..., outputs, inputs]`.

    weight: uint8 of that shape. scales: `[..., squares, squares]`, the last of them cut off where
    the weight ends. Each piece is to be evaluated before the next one is asked for.
    """
    *stack, outputs, inputs = weight.shape
    height, width = packing.block_rows, packing.group_size
    rows = max(BLOCK_VALUES // max(math.prod(stack) * inputs, 1) // height, 1) * height
    for first in range(0, outputs, rows):
        count = min(rows, outputs - first)
        plain = mx.from_fp8(weight[..., first : first + count, :], dtype=mx.float32)
        squares = scales[..., first // height : -(-(first + count) // height), :]
        spread = mx.repeat(squares.astype(mx.float32), width, axis=-1)[..., :inputs]
        spread = mx.repeat(spread, height, axis=-2)[..., :count, :]
        yield (plain * spread).astype(dtype)
