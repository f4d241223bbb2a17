"""Qwen3.5 with its tower: a hybrid text that reads what a stacked tower makes of images.

Invariants:
- Its passes are a Qwen3.5's: features take the places of tokens' embeddings, and where tokens stand
  on three axes is in the batch, for the layers that attend.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_models.families.sighted.seeing_qwen import Stacked
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.families.qwen3_5 import Qwen35Model
from mlxd_worker.models.layers.patches import see_each
from mlxd_worker.models.layers.stacked_tower import StackedTower
from mlxd_worker.models.weights.reader import Reader


class Qwen35VlModel(Qwen35Model, Sighted):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: Stacked[HybridConfig], weights: Reader) -> None:
        """Take all weights, the text's first."""
        super().__init__(config.text, weights)
        self._tower = StackedTower(config.tower, weights)

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, places, hidden] of images of one shape, evaluated."""
        return see_each(self._tower, pixels, settings)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        return {**super().parameters(), **self._tower.arrays()}


build = Qwen35VlModel
