"""Qwen2.5-VL: a Qwen2 that reads what a windowed tower makes of images.

Invariants:
- Its passes are a Llama's: features take the places of tokens' embeddings, and where tokens stand
  on three axes is in the batch (`Batch.turns`).
"""

from collections.abc import Mapping

import mlx.core as mx

from mlxd_models.families.sighted.qwen2_5_vl import Qwen25VlConfig
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.layers.tower import scale_pixels
from mlxd_worker.models.layers.windowed_tower import WindowedTower
from mlxd_worker.models.weights.reader import Reader


class Qwen25VlModel(LlamaModel, Sighted):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: Qwen25VlConfig, weights: Reader) -> None:
        """Take all weights, the text's first."""
        super().__init__(config.text, weights)
        self._tower = WindowedTower(config.tower, weights)

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, places, hidden] of images of one shape, evaluated."""
        scaled = [scale_pixels(pixels[at], settings) for at in range(pixels.shape[0])]
        features = mx.stack([self._tower(image) for image in scaled])
        mx.eval(features)
        return features

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        return {**super().parameters(), **self._tower.arrays()}


build = Qwen25VlModel
