"""Gemma 3 that sees: its text reads averages of what a tower makes of an image's patches.

Invariants:
- Its passes are a Llama's: features take the places of tokens' embeddings, unscaled, and how far
  each token sees is in the batch (`Batch.lasts`).

The arithmetic is that of Gemma 3 (Gemma Team, 2025).
"""

import math
from collections.abc import Mapping

import mlx.core as mx

from mlxd_models.families.sighted.gemma3 import PLACE_NORM, PROJECTION, Gemma3Config
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.layers.tower import Tower, scale_pixels
from mlxd_worker.models.weights.reader import Reader


class SeeingGemma3(LlamaModel, Sighted):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: Gemma3Config, weights: Reader) -> None:
        """Take all weights, the text's first."""
        super().__init__(config.text, weights)
        self._sighted = config
        self._tower = Tower(config.tower, weights)
        self._projection = weights.take(PROJECTION)
        self._place_norm = 1 + weights.take(PLACE_NORM)
        mx.eval(self._place_norm)

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, tokens, hidden] of images, evaluated."""
        config = self._sighted
        rows = average_squares(
            self._tower(scale_pixels(pixels, settings)), config.across, config.pooled
        )
        normed = mx.fast.rms_norm(rows, self._place_norm, config.tower.norm_eps)
        features = normed @ self._projection
        mx.eval(features)
        return features

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        return {
            **super().parameters(),
            **self._tower.arrays(),
            "projector.projection": self._projection,
            "projector.norm": self._place_norm,
        }


def average_squares(rows: mx.array, across: int, side: int) -> mx.array:
    """Return the averages [N, across * across, hidden] of patches' rows, lazy.

    rows: [N, patches, hidden], line by line of a square of patches. side: patches to a side of what
    is averaged; what is left at the edges is not counted.
    """
    count, patches, hidden = rows.shape
    length, used = math.isqrt(patches), across * side
    seen = rows.reshape(count, length, length, hidden)[:, :used, :used]
    squares = seen.reshape(count, across, side, across, side, hidden)
    return mx.mean(squares, axis=(2, 4)).reshape(count, across * across, hidden)


build = SeeingGemma3
