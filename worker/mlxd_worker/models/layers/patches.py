"""What towers that keep an image's shape have in common: images, patches and their rotations.

Invariants:
- Patches lie place by place: those of a square of `merge` x `merge` one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from mlxd_models.families.common.sight_fields import COLOURS
from mlxd_models.families.sighted.shaped import PATCHES, ShapedConfig
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.layers.settling import settle
from mlxd_worker.models.layers.tower import scale_pixels
from mlxd_worker.models.weights.reader import Reader


def see_each(
    tower: Callable[[mx.array], mx.array], pixels: mx.array, settings: ImageSettings
) -> mx.array:
    """Return the features [N, places, values] of images of one shape, one by one, evaluated.

    tower: makes features [places, values] of an image, float32 [height, width, 3], scaled. pixels:
    uint8 [N, height, width, 3].
    """
    seen = [tower(scale_pixels(pixels[at], settings)) for at in range(pixels.shape[0])]
    features = mx.stack(seen)
    mx.eval(features)
    return features


def take_patches(config: ShapedConfig, weights: Reader) -> mx.array:
    """Take the weights over a patch's values as [hidden, patch_values], colours first."""
    weight = weights.take(f"{PATCHES}.weight")
    if weight.shape != (config.hidden, COLOURS, config.frames, config.patch, config.patch):
        weight = weight.transpose(0, 4, 1, 2, 3)
    flat = mx.contiguous(weight.reshape(config.hidden, -1))
    mx.eval(flat)
    return flat


def embed_patches(
    config: ShapedConfig, pixels: mx.array, weight: mx.array, order: mx.array | None = None
) -> mx.array:
    """Return [patches, hidden]: what an image's patches become, before any bias; lazy.

    pixels: [height, width, 3]. weight: as `take_patches` returns. order: as of `cut_patches`.
    """
    seen = pixels.astype(weight.dtype)
    cut = cut_patches(
        seen, patch=config.patch, merge=config.merge, frames=config.frames, order=order
    )
    return cut @ weight.T


def cut_patches(
    pixels: mx.array, *, patch: int, merge: int, frames: int, order: mx.array | None = None
) -> mx.array:
    """Return [patches, 3 * frames * patch * patch]: an image's patches, place by place; lazy.

    pixels: [height, width, 3]. patch: pixels to a side of a patch. merge: patches to a side of a
    place. frames: how many times a patch has its picture. order: the places, counted row by row, as
    they are to lie; None: as they are counted.
    """
    lines, columns = (length // (patch * merge) for length in pixels.shape[:2])
    cut = pixels.reshape(lines, merge, patch, columns, merge, patch, COLOURS)
    # As the weights have them: colours first, then frames, then rows and columns of a patch.
    by_place = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(
        lines * columns, merge * merge, COLOURS, 1, patch * patch
    )
    by_place = by_place if order is None else by_place[order]
    shape = (*by_place.shape[:3], frames, patch * patch)
    return mx.broadcast_to(by_place, shape).reshape(-1, COLOURS * frames * patch * patch)


def patch_angles(config: ShapedConfig, order: mx.array, columns: int) -> mx.array:
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


def split_heads(
    joined: mx.array, turns: tuple[mx.array, mx.array], *, heads: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values `[patches, heads, width]`, the first two rotated.

    joined: [patches, 3 * hidden], evaluated on a CPU; nothing that is returned there holds it.
    """
    split = joined.reshape(joined.shape[0], 3, heads, -1)
    queries, keys = (settle(turn_heads(split[:, part], turns)) for part in range(2))
    values = split[:, 2]
    return queries, keys, settle(mx.contiguous(values)) if runs_cpu() else values


def turn_heads(heads: mx.array, turns: tuple[mx.array, mx.array]) -> mx.array:
    """Rotate `[patches, heads, width]` by cosines and sines of their angles, in float32."""
    cosines, sines = turns
    first, second = mx.split(heads.astype(mx.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return mx.concatenate(turned, axis=-1).astype(heads.dtype)
