"""What towers that keep an image's shape have in common: patches and their rotations.

Invariants:
- Patches lie place by place: those of a square of `merge` x `merge` one after another.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlxd_models.families.sighted import windowed as names
from mlxd_models.families.sighted.stacked import StackedConfig
from mlxd_models.families.sighted.tower import COLOURS
from mlxd_models.families.sighted.windowed import WindowedConfig
from mlxd_worker.models.weights.reader import Reader

TowerShape = WindowedConfig | StackedConfig


def take_patches(config: TowerShape, weights: Reader) -> mx.array:
    """Take the weights over a patch's values as [hidden, patch_values], colours first."""
    weight = weights.take(f"{names.PATCHES}.weight")
    if weight.shape != (config.hidden, COLOURS, config.frames, config.patch, config.patch):
        weight = weight.transpose(0, 4, 1, 2, 3)
    flat = mx.contiguous(weight.reshape(config.hidden, -1))
    mx.eval(flat)
    return flat


def cut_patches(config: TowerShape, pixels: mx.array, order: mx.array | None = None) -> mx.array:
    """Return [patches, patch_values]: an image's patches, place by place; lazy.

    pixels: [height, width, 3]. order: the places, counted row by row, as they are to lie; None: as
    they are counted.
    """
    patch, merge = config.patch, config.merge
    lines, columns = (length // config.side for length in pixels.shape[:2])
    cut = pixels.reshape(lines, merge, patch, columns, merge, patch, COLOURS)
    # As the weights have them: colours first, then frames, then rows and columns of a patch.
    by_place = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(
        lines * columns, merge * merge, COLOURS, 1, patch * patch
    )
    by_place = by_place if order is None else by_place[order]
    shape = (*by_place.shape[:3], config.frames, patch * patch)
    return mx.broadcast_to(by_place, shape).reshape(-1, config.patch_values)


def patch_angles(config: TowerShape, order: mx.array, columns: int) -> mx.array:
    """Return by how many radians a patch's pairs turn, [patches, 1, head width / 2], float32.

    Half of them by its row, the others by its column. order: the places as they lie.
    """
    merge, width = config.merge, config.hidden // config.heads
    inside = mx.arange(merge * merge, dtype=mx.int32)
    heights = (order // columns)[:, None] * merge + inside // merge
    widths = (order % columns)[:, None] * merge + inside % merge
    steps = mx.arange(0, width // 2, 2, dtype=mx.float32) / (width // 2)
    periods = mx.exp(steps * math.log(config.base))
    both = [axis.reshape(-1, 1).astype(mx.float32) / periods for axis in (heights, widths)]
    return mx.concatenate(both, axis=-1)[:, None]


def turn_heads(heads: mx.array, turns: tuple[mx.array, mx.array]) -> mx.array:
    """Rotate `[patches, heads, width]` by cosines and sines of their angles, in float32."""
    cosines, sines = turns
    first, second = mx.split(heads.astype(mx.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return mx.concatenate(turned, axis=-1).astype(heads.dtype)
