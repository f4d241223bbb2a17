"""A stacked tower over one image of any shape: Qwen3-VL's, and without deep layers Qwen3.5's.

Invariants:
- All patches see each other; they lie place by place, as an image's places are counted.
- Learned positions are interpolated in float32, and become the weights' type before they are added.
- Half a layer is evaluated before the next half begins: what is alive at once is one half's.

The arithmetic is that of Qwen3-VL (Bai et al., 2025), which adds what deep layers leave to the
text's first layers as DeepStack does (Meng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.sighted import shaped
from mlxd_models.families.sighted import stacked as names
from mlxd_models.families.sighted.stacked import StackedConfig
from mlxd_models.families.sighted.tower import TowerActivation
from mlxd_worker.models.layers.patches import (
    embed_patches,
    patch_angles,
    split_heads,
    take_patches,
)
from mlxd_worker.models.layers.settling import settle
from mlxd_worker.models.layers.tower import LayerNorm, activate
from mlxd_worker.models.layers.tower_attention import attend_bounded
from mlxd_worker.models.weights.linear import Projection, Weighted, named_arrays
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class StackedLayer(Weighted):
    """One layer: norm, attention; norm, feed-forward."""

    attention_norm: LayerNorm
    qkv: Projection
    output: Projection
    mlp_norm: LayerNorm
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Merger(Weighted):
    """Makes values of places of those of their patches."""

    norm: LayerNorm
    """Over each patch, or over all patches of a place, side by side: by its width."""
    first: Projection
    second: Projection

    def __call__(self, rows: mx.array, merged: int) -> mx.array:
        """Return [places, output] of [patches, hidden], `merged` values a place; lazy."""
        width = self.norm.weight.shape[0]
        normed = self.norm(rows.reshape(-1, width)).reshape(-1, merged)
        return self.second(activate(self.first(normed), TowerActivation.GELU))


class StackedTower:
    """A loaded tower. One owner: the engine thread."""

    def __init__(self, config: StackedConfig, weights: Reader) -> None:
        """Take all of its weights."""
        self.config = config
        self._patches = take_patches(config, weights)
        self._patch_bias = weights.take(f"{shaped.PATCHES}.bias")
        self._table = weights.take(f"{names.TABLE}.weight")
        self._layers = tuple(_take_layer(weights, at) for at in range(config.layers))
        self._merger = _take_merger(weights, names.MERGER)
        self._deep = tuple(
            _take_merger(weights, names.level_merger(level)) for level in range(config.levels)
        )

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return an image's features [places, (1 + levels) * output], row by row, evaluated.

        pixels: float32 [height, width, 3], scaled; both are multiples of a place's side.
        """
        config = self.config
        lines, columns = (length // config.side for length in pixels.shape[:2])
        rows = embed_patches(config, pixels, self._patches) + self._patch_bias
        mx.eval(rows)
        rows = rows + self._lay_table(lines, columns)
        angles = patch_angles(config, mx.arange(lines * columns, dtype=mx.int32), columns)
        turns = mx.cos(angles), mx.sin(angles)
        mx.eval(rows, turns)
        deep: list[mx.array] = []
        for index, layer in enumerate(self._layers):
            rows = rows + layer.output(self._attend(layer, rows, turns))
            mx.eval(rows)
            inner = settle(layer.up(layer.mlp_norm(rows)))
            inner = settle(activate(inner, TowerActivation.GELU_TANH))
            rows = rows + layer.down(inner)
            del inner
            mx.eval(rows)
            if index in config.deep:
                deep.append(self._deep[len(deep)](rows, config.merged))
                mx.eval(deep[-1])
        features = mx.concatenate([self._merger(rows, config.merged), *deep], axis=-1)
        mx.eval(features)
        return features

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {
            "tower.patches": self._patches,
            "tower.patch_bias": self._patch_bias,
            "tower.table": self._table,
        }
        named |= named_arrays("tower.merger", self._merger)
        for level, merger in enumerate(self._deep):
            named |= named_arrays(f"tower.deep.{level}", merger)
        for index, layer in enumerate(self._layers):
            named |= named_arrays(f"tower.layers.{index}", layer)
        return named

    def _lay_table(self, lines: int, columns: int) -> mx.array:
        """Return [patches, hidden]: the learned square, drawn over the image corner to corner.

        Between its points it is interpolated, first down, then across; lazy.
        """
        merge, side = self.config.merge, self.config.table
        table = self._table.astype(mx.float32).reshape(side, side, -1)
        for axis, count in enumerate((lines * merge, columns * merge)):
            places = mx.arange(count, dtype=mx.float32) * (side - 1) / max(count - 1, 1)
            before = mx.minimum(mx.floor(places).astype(mx.int32), side - 1)
            shape = (-1, 1, 1) if axis == 0 else (-1, 1)
            share = (places - before).reshape(shape)
            behind = mx.minimum(before + 1, side - 1)
            nearer, farther = (mx.take(table, at, axis=axis) for at in (before, behind))
            table = nearer * (1 - share) + farther * share
        by_place = table.reshape(lines, merge, columns, merge, -1).transpose(0, 2, 1, 3, 4)
        return by_place.reshape(lines * columns * merge**2, -1).astype(self._table.dtype)

    def _attend(
        self, layer: StackedLayer, rows: mx.array, turns: tuple[mx.array, mx.array]
    ) -> mx.array:
        """Return what the patches read, before the output projection."""
        config = self.config
        joined = settle(layer.qkv(layer.attention_norm(rows)))
        heads = split_heads(joined, turns, heads=config.heads)
        del joined
        queries, keys, values = (part.swapaxes(0, 1)[None] for part in heads)
        read = settle(attend_bounded(queries, keys, values))
        return read[0].swapaxes(0, 1).reshape(-1, config.hidden)


def _take_norm(weights: Reader, stem: str) -> LayerNorm:
    weight, bias = (weights.take(f"{stem}.{part}") for part in ("weight", "bias"))
    return LayerNorm(weight, bias, shaped.NORM_EPS)


def _take_layer(weights: Reader, index: int) -> StackedLayer:
    prefix = shaped.layer_prefix(index)
    before, between = shaped.NORMS
    return StackedLayer(
        attention_norm=_take_norm(weights, prefix + before),
        qkv=weights.linear([prefix + shaped.QKV], has_bias=True),
        output=weights.linear([prefix + shaped.OUTPUT], has_bias=True),
        mlp_norm=_take_norm(weights, prefix + between),
        up=weights.linear([prefix + names.UP], has_bias=True),
        down=weights.linear([prefix + names.DOWN], has_bias=True),
    )


def _take_merger(weights: Reader, prefix: str) -> Merger:
    first, second = (
        weights.linear([prefix + name], has_bias=True) for name in names.MERGER_LINEARS
    )
    return Merger(_take_norm(weights, prefix + names.MERGER_NORM), first, second)
