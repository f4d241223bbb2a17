"""A windowed tower over one image of any shape: patches, layers, places. That of Qwen2.5-VL.

Invariants:
- Patches lie place by place, those of a window together, and windows of one size together: within
  windows attention is then one call a size, without a mask. What comes out is in the image's order.
- Pixels are scaled in float32 and become the weights' type before the first product.
- Half a layer is evaluated before the next half begins: what is alive at once is one half's. On a
  CPU, which makes room for all that is evaluated together, so are a half's parts (`settle`).

The arithmetic is that of Qwen2.5-VL (Bai et al., 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.sighted import shaped
from mlxd_models.families.sighted import windowed as names
from mlxd_models.families.sighted.tower import TowerActivation
from mlxd_models.families.sighted.windowed import WindowedConfig
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.layers.patches import (
    embed_patches,
    patch_angles,
    split_heads,
    take_patches,
)
from mlxd_worker.models.layers.settling import settle
from mlxd_worker.models.layers.tower import activate
from mlxd_worker.models.layers.tower_attention import attend_bounded
from mlxd_worker.models.weights.fused import add_projection, gate_projection, normed_times
from mlxd_worker.models.weights.linear import Projection, Weighted, named_arrays
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class Windows:
    """How an image's places lie, window by window."""

    order: tuple[int, ...]
    """The places, counted row by row in the image, as they lie."""
    groups: tuple[tuple[int, int], ...]
    """How many windows of how many places there are, as they lie."""


def lay_windows(rows: int, columns: int, window: int) -> Windows:
    """Return how the places of an image lie where windows have `window` places to a side. Pure.

    At the lower and the right edge windows are what is left.
    """
    by_size: dict[int, list[list[int]]] = {}
    for top in range(0, rows, window):
        for left in range(0, columns, window):
            right = min(left + window, columns)
            lines = range(top, min(top + window, rows))
            places = [line * columns + at for line in lines for at in range(left, right)]
            by_size.setdefault(len(places), []).append(places)
    order = [place for alike in by_size.values() for places in alike for place in places]
    return Windows(tuple(order), tuple((len(alike), size) for size, alike in by_size.items()))


@dataclass(frozen=True, slots=True)
class WindowedLayer(Weighted):
    """One layer: norm, attention; norm, feed-forward."""

    attention_norm: Norm
    qkv: Projection
    output: Projection
    mlp_norm: Norm
    gate_up: Projection
    down: Projection


class WindowedTower:
    """A loaded tower. One owner: the engine thread."""

    def __init__(self, config: WindowedConfig, weights: Reader) -> None:
        """Take all of its weights."""
        self.config = config
        self._patches = take_patches(config, weights)
        self._layers = tuple(_take_layer(weights, at) for at in range(config.layers))
        self._merger_norm = _take_norm(weights, names.MERGER_NORM)
        first, second = names.MERGER
        self._first = weights.linear([first], has_bias=True)
        self._second = weights.linear([second], has_bias=True)

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return an image's features [places, output], row by row, lazy.

        pixels: float32 [height, width, 3], scaled; both are multiples of a place's side.
        """
        config = self.config
        lines, columns = (length // config.side for length in pixels.shape[:2])
        windows = lay_windows(lines, columns, config.window)
        order = mx.array(windows.order, dtype=mx.int32)
        rows = embed_patches(config, pixels, self._patches, order)
        angles = patch_angles(config, order, columns)
        turns = mx.cos(angles), mx.sin(angles)
        apart = [(count, size * config.merge**2) for count, size in windows.groups]
        whole = [(1, rows.shape[0])]
        mx.eval(rows, turns)
        for index, layer in enumerate(self._layers):
            groups = whole if index in config.full else apart
            rows = add_projection(rows, self._attend(layer, rows, turns, groups), layer.output)
            mx.eval(rows)
            rows = self._feed(layer, rows)
        return self._merge(rows)[mx.argsort(order)]

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {"tower.patches": self._patches}
        named |= named_arrays("tower.merger.norm", self._merger_norm)
        named |= named_arrays("tower.merger.first", self._first)
        named |= named_arrays("tower.merger.second", self._second)
        for index, layer in enumerate(self._layers):
            named |= named_arrays(f"tower.layers.{index}", layer)
        return named

    def _attend(
        self,
        layer: WindowedLayer,
        rows: mx.array,
        turns: tuple[mx.array, mx.array],
        groups: Sequence[tuple[int, int]],
    ) -> mx.array:
        """Return what the patches read, before the output projection.

        groups: how many neighbours, so many times, see each other.
        """
        config = self.config
        joined = settle(normed_times(rows, layer.attention_norm, layer.qkv))
        heads = split_heads(joined, turns, heads=config.heads)
        shape_of_head = heads[0].shape[1:]
        del joined
        read, first = [], 0
        for count, length in groups:
            stop = first + count * length
            shape = (count, length, *shape_of_head)
            queries, keys, values = (
                part[first:stop].reshape(shape).swapaxes(1, 2) for part in heads
            )
            own = attend_bounded(queries, keys, values)
            read.append(settle(own.swapaxes(1, 2).reshape(count * length, config.hidden)))
            first = stop
        return read[0] if len(read) == 1 else settle(mx.concatenate(read, axis=0))

    def _feed(self, layer: WindowedLayer, rows: mx.array) -> mx.array:
        """Return patches with what the feed-forward adds, evaluated; on a CPU some at a time."""
        count, width = rows.shape[0], self.config.mlp
        at_once = names.FED_AT_ONCE if runs_cpu() else count
        fed = []
        for first in range(0, count, at_once):
            some = rows[first : first + at_once]
            inner = settle(gate_projection(some, layer.mlp_norm, layer.gate_up, width=width))
            fed.append(settle(add_projection(some, inner, layer.down)))
            del inner
        whole = fed[0] if len(fed) == 1 else mx.concatenate(fed, axis=0)
        mx.eval(whole)
        return whole

    def _merge(self, rows: mx.array) -> mx.array:
        """Return the features of places, as they lie."""
        norm = self._merger_norm
        normed = mx.fast.rms_norm(rows, norm.weight, norm.eps).reshape(-1, self.config.merged)
        return self._second(activate(self._first(normed), TowerActivation.GELU))


def _take_norm(weights: Reader, stem: str) -> Norm:
    return Norm(weights.take(f"{stem}.weight"), shaped.NORM_EPS)


def _take_layer(weights: Reader, index: int) -> WindowedLayer:
    prefix = shaped.layer_prefix(index)
    before, between = shaped.NORMS
    return WindowedLayer(
        attention_norm=_take_norm(weights, prefix + before),
        qkv=weights.linear([prefix + shaped.QKV], has_bias=True),
        output=weights.linear([prefix + shaped.OUTPUT], has_bias=True),
        mlp_norm=_take_norm(weights, prefix + between),
        gate_up=weights.linear([prefix + name for name in names.GATED], has_bias=True),
        down=weights.linear([prefix + names.DOWN], has_bias=True),
    )
