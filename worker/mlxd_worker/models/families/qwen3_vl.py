"""Qwen3-VL: a Qwen3 that reads what a stacked tower makes of images.

Invariants:
- Its passes are a Llama's: features take the places of tokens' embeddings, their deeper levels are
  added behind the first layers (`Inlay`), and where tokens stand on three axes is in the batch.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlxd_models.families.sighted.qwen3_vl import Qwen3VlConfig
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.layers.stacked_tower import StackedTower, see_each
from mlxd_worker.models.weights.reader import Reader


class Qwen3VlModel(LlamaModel, Sighted):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: Qwen3VlConfig, weights: Reader) -> None:
        """Take all weights, the text's first."""
        super().__init__(config.text, weights)
        self._tower = StackedTower(config.tower, weights)

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, places, (1 + levels) * hidden] of images of one shape."""
        return see_each(self._tower, pixels, settings)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        return {**super().parameters(), **self._tower.arrays()}


build = Qwen3VlModel
