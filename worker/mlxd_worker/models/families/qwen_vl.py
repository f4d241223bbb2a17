"""Qwens that see whose text is a Llama: Qwen2.5-VL and, with experts or without, Qwen3-VL.

Invariants:
- Its passes are a Llama's: features take the places of tokens' embeddings, their deeper levels are
  added behind the first layers (`Inlay`), and where tokens stand on three axes is in the batch.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.sighted.seeing_qwen import SeeingQwen
from mlxd_models.families.sighted.stacked import StackedConfig
from mlxd_models.families.sighted.windowed import WindowedConfig
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.layers.patches import see_each
from mlxd_worker.models.layers.stacked_tower import StackedTower
from mlxd_worker.models.layers.windowed_tower import WindowedTower
from mlxd_worker.models.weights.reader import Reader

Config = SeeingQwen[DecoderConfig, StackedConfig] | SeeingQwen[DecoderConfig, WindowedConfig]


class QwenVlModel(LlamaModel, Sighted):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: Config, weights: Reader) -> None:
        """Take all weights, the text's first."""
        super().__init__(config.text, weights)
        self._tower = _take_tower(config.tower, weights)

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, places, (1 + levels) * hidden] of images of one shape."""
        return see_each(self._tower, pixels, settings)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        return {**super().parameters(), **self._tower.arrays()}


def _take_tower(
    config: StackedConfig | WindowedConfig, weights: Reader
) -> StackedTower | WindowedTower:
    if isinstance(config, StackedConfig):
        return StackedTower(config, weights)
    return WindowedTower(config, weights)


build = QwenVlModel
