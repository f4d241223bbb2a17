"""A vision tower over batches of images: patches, layers of full attention, rows of one layer.

Invariants:
- Rows are flat `[images * rows, hidden]` everywhere but inside attention; images never mix.
- Pixels are scaled in float32 and become the weights' type before the first product.
- A layer is evaluated before the next one begins: what is alive at once is one layer's, and on a
  CPU one part's (`settle`).

The arithmetic is that of CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.common.sight_fields import COLOURS
from mlxd_models.families.sighted import tower as names
from mlxd_models.families.sighted.tower import TowerActivation, TowerConfig
from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.layers.settling import settle
from mlxd_worker.models.layers.tower_attention import attend_bounded
from mlxd_worker.models.weights.linear import Projection, Weighted, named_arrays
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class LayerNorm(Weighted):
    """A norm over whole rows, with a bias."""

    weight: mx.array
    bias: mx.array
    eps: float

    def __call__(self, rows: mx.array) -> mx.array:
        """Return the rows normalised, lazy."""
        return mx.fast.layer_norm(rows, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class TowerLayer(Weighted):
    """One layer: norm, attention; norm, feed-forward."""

    attention_norm: LayerNorm
    qkv: Projection
    output: Projection
    mlp_norm: LayerNorm
    up: Projection
    down: Projection


class Tower:
    """A loaded tower. One owner: the engine thread."""

    def __init__(self, config: TowerConfig, weights: Reader) -> None:
        """Take all of its weights."""
        self.config = config
        self._patches = _take_patches(config, weights)
        self._patch_bias = None if config.has_class else weights.take(f"{names.PATCHES}.bias")
        self._places = weights.take(f"{names.PLACES}.weight")
        self._class = weights.take(names.CLASS) if config.has_class else None
        self._first_norm = (
            _take_norm(config, weights, names.FIRST_NORM) if config.has_class else None
        )
        self._layers = tuple(_take_layer(config, weights, at) for at in range(config.layers))
        self._last_norm = (
            _take_norm(config, weights, names.LAST_NORM) if config.ends_normed else None
        )

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return rows [N, rows, hidden] of the layer, or the norm, that features come from.

        pixels: float32 [N, side, side, 3], scaled.
        """
        config, count = self.config, pixels.shape[0]
        rows = settle(self._embed(pixels))
        if self._first_norm is not None:
            rows = self._first_norm(rows)
        rows = rows.reshape(-1, config.hidden)
        for layer in self._layers:
            rows = settle(rows + layer.output(self._attend(layer, rows, count)))
            inner = activate(settle(layer.up(layer.mlp_norm(rows))), config.activation)
            rows = rows + layer.down(settle(inner))
            del inner
            mx.eval(rows)
        if self._last_norm is not None:
            rows = self._last_norm(rows)
        return rows.reshape(count, config.rows, config.hidden)

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {"tower.patches": self._patches, "tower.places": self._places}
        if self._patch_bias is not None:
            named["tower.patch_bias"] = self._patch_bias
        if self._class is not None:
            named["tower.class"] = self._class
        if self._first_norm is not None:
            named |= named_arrays("tower.first_norm", self._first_norm)
        if self._last_norm is not None:
            named |= named_arrays("tower.last_norm", self._last_norm)
        for index, layer in enumerate(self._layers):
            named |= named_arrays(f"tower.layers.{index}", layer)
        return named

    def _embed(self, pixels: mx.array) -> mx.array:
        """Return [N, rows, hidden]: what patches become, at their places."""
        config, count = self.config, pixels.shape[0]
        patch, across = config.patch, config.side // config.patch
        seen = pixels[:, : across * patch, : across * patch].astype(self._places.dtype)
        cut = seen.reshape(count, across, patch, across, patch, COLOURS)
        # As the weights have them: colours first, then rows and columns within a patch.
        flat = settle(cut.transpose(0, 1, 3, 5, 2, 4).reshape(count * config.patches, -1))
        del pixels, seen, cut
        rows = flat @ self._patches.T
        if self._patch_bias is not None:
            rows = rows + self._patch_bias
        rows = rows.reshape(count, config.patches, config.hidden)
        if self._class is not None:
            first = mx.broadcast_to(self._class, (count, 1, config.hidden))
            rows = mx.concatenate([first, rows], axis=1)
        return rows + self._places

    def _attend(self, layer: TowerLayer, rows: mx.array, count: int) -> mx.array:
        """Return what the rows read of their own image, before the output projection."""
        config = self.config
        width = config.hidden // config.heads
        joined = settle(layer.qkv(layer.attention_norm(rows)))
        split = joined.reshape(count, config.rows, 3, config.heads, width).transpose(2, 0, 3, 1, 4)
        read = settle(attend_bounded(split[0], split[1], split[2]))
        return read.transpose(0, 2, 1, 3).reshape(-1, config.hidden)


def activate(values: mx.array, activation: TowerActivation) -> mx.array:
    """Return values behind an activation, lazy."""
    match activation:
        case TowerActivation.QUICK_GELU:
            return values * mx.sigmoid(1.702 * values)
        case TowerActivation.GELU:
            return values * (1 + mx.erf(values / math.sqrt(2))) / 2
        case TowerActivation.GELU_TANH:
            inner = values + 0.044715 * values * values * values
            return values * (1 + mx.tanh(math.sqrt(2 / math.pi) * inner)) / 2


def scale_pixels(pixels: mx.array, settings: ImageSettings) -> mx.array:
    """Return 8-bit pixels [..., 3] as a tower takes them, float32, lazy."""
    mean, deviation = mx.array(settings.mean), mx.array(settings.deviation)
    return (pixels.astype(mx.float32) * settings.scale - mean) / deviation


def _take_patches(config: TowerConfig, weights: Reader) -> mx.array:
    """Take the weights over a patch's values as [hidden, 3 * patch * patch], colours first."""
    weight = weights.take(f"{names.PATCHES}.weight")
    if weight.shape != (config.hidden, COLOURS, config.patch, config.patch):
        weight = weight.transpose(0, 3, 1, 2)
    flat = mx.contiguous(weight.reshape(config.hidden, -1))
    mx.eval(flat)
    return flat


def _take_norm(config: TowerConfig, weights: Reader, stem: str) -> LayerNorm:
    weight, bias = (weights.take(f"{stem}.{part}") for part in ("weight", "bias"))
    return LayerNorm(weight, bias, config.norm_eps)


def _take_layer(config: TowerConfig, weights: Reader, index: int) -> TowerLayer:
    prefix = names.tower_layer(index)
    return TowerLayer(
        attention_norm=_take_norm(config, weights, f"{prefix}layer_norm1"),
        qkv=weights.linear([prefix + name for name in names.ATTENTION], has_bias=True),
        output=weights.linear([prefix + names.OUTPUT], has_bias=True),
        mlp_norm=_take_norm(config, weights, f"{prefix}layer_norm2"),
        up=weights.linear([prefix + names.UP], has_bias=True),
        down=weights.linear([prefix + names.DOWN], has_bias=True),
    )
