"""LLaVA: a Llama that reads what a projector makes of a tower's rows.

Invariants:
- Its passes are a Llama's: features take the places of tokens' embeddings, nothing else differs.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlxd_models.families.sighted.llava import FIRST, SECOND, LlavaConfig
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.layers.tower import Tower, activate, scale_pixels
from mlxd_worker.models.weights.linear import named_arrays
from mlxd_worker.models.weights.reader import Reader


class LlavaModel(LlamaModel, Sighted):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: LlavaConfig, weights: Reader) -> None:
        """Take all weights, the text's first."""
        super().__init__(config.text, weights)
        self._sighted = config
        self._tower = Tower(config.tower, weights)
        self._first = weights.linear([FIRST], has_bias=config.projector_bias)
        self._second = weights.linear([SECOND], has_bias=config.projector_bias)

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, tokens, hidden] of images, evaluated."""
        config = self._sighted
        rows = self._tower(scale_pixels(pixels, settings))
        rows = rows[:, int(config.drops_class) :].reshape(-1, config.tower.hidden)
        inner = activate(self._first(rows), config.activation)
        features = self._second(inner).reshape(pixels.shape[0], config.tokens, -1)
        mx.eval(features)
        return features

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        return {
            **super().parameters(),
            **self._tower.arrays(),
            **named_arrays("projector.first", self._first),
            **named_arrays("projector.second", self._second),
        }


build = LlavaModel
