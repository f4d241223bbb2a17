"""A tower that keeps an image's shape and looks through windows: Qwen2.5-VL's.

Invariants:
- Patches attend within windows of whole places, but for a few layers in which all see all.
- Layers have RMS norms before both halves, and gated feed-forwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import COLOURS, fill_in
from mlxd_models.families.common.tensors import TensorSpec, linear_specs
from mlxd_models.families.sighted.shaped import (
    NORMS,
    ShapedConfig,
    layer_prefix,
    layer_shapes,
    listed_layers,
    parse_shaped,
    patch_weight,
)
from mlxd_models.families.sighted.tower import SCORES_MAX, SIDE_MAX
from mlxd_models.sizes.weight_forms import TOWER_PREFIX

GATED, DOWN = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
MERGER_NORM: Final = f"{TOWER_PREFIX}merger.ln_q"
MERGER: Final = (f"{TOWER_PREFIX}merger.mlp.0", f"{TOWER_PREFIX}merger.mlp.2")
FED_AT_ONCE: Final = 4096
"""Patches that a feed-forward reads at once on a CPU: all of an image would be the widest part."""
_SILU: Final = "silu"
_FULL: Final = "fullatt_block_indexes"

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "out_hidden_size": 3584, _FULL: (7, 15, 23, 31),
    }
)  # fmt: skip
"""What published configs may leave out."""


@dataclass(frozen=True, slots=True)
class WindowedConfig(ShapedConfig):
    """The shape of a tower."""

    window: int
    """Places to a side of a window."""
    full: frozenset[int]
    """The layers in which all patches of an image see each other."""

    def pass_values_of(self, places: int) -> int:
        """Return the values alive at most for an image of so many places.

        Its patches before they are embedded; or pixels, residual, norm and angles beside the widest
        part of a layer: attention, around its rotations, with scores as products, exponentials and
        sums, or the feed-forward around its activation; or the places around the merger's
        products. MLX makes room for all that is evaluated together.
        """
        rows = places * self.merge**2
        embedding = rows * (3 * self.patch_values + self.hidden)
        attention = rows * 16 * self.hidden + 3 * self._scores(rows)
        held = rows * (3 * self.hidden + COLOURS * self.patch**2)
        layer = held + max(attention, rows * 5 * self.mlp)
        return max(embedding, layer, self._merging(places))

    def settled_values_of(self, places: int) -> int:
        """Return the same for so many places where each part is evaluated before the next.

        The widest of: patches, cut and laid out, while angles are made; beside pixels and turns,
        attention with its scores, or the feed-forward of as many patches as it reads at once; the
        merger. That much was measured.
        """
        rows = places * self.merge**2
        values = COLOURS * self.patch**2
        angles = 4 * self.hidden // self.heads
        embedding = rows * (self.patch_values + 13 * values // 4 + self.hidden + angles)
        attention = max(self._settled_attention(rows, seen) for seen in self._spans(rows))
        forward = rows * 4 * self.hidden + min(rows, FED_AT_ONCE) * 5 * self.mlp
        layer = rows * self.pixels_and_turns + max(attention, forward)
        return max(embedding, layer, self._merging(places))

    def _settled_attention(self, rows: int, seen: int) -> int:
        """Return the values alive at most while so many patches each see so many.

        Most where all is one part, for which there is room before any of it is computed.
        """
        part = min(rows, SCORES_MAX // (self.heads * seen))
        return (8 * rows + 2 * part) * self.hidden + min(self.heads * rows * seen, SCORES_MAX)

    def _scores(self, rows: int) -> int:
        """Return how many scores of an image of so many patches are there at once."""
        return min(self.heads * rows * max(self._spans(rows)), SCORES_MAX)

    def _spans(self, rows: int) -> set[int]:
        """Return how many of so many patches each of them sees: in its window, or all."""
        windows = min(rows, (self.window * self.merge) ** 2)
        apart = {windows} if len(self.full) < self.layers else set()
        return apart | {rows} if self.full else apart

    def _merging(self, places: int) -> int:
        """Return the values alive around the merger."""
        rows = places * self.merge**2
        return rows * self.hidden + places * (3 * self.merged + 2 * self.output)


def parse_windowed(fields: Fields) -> WindowedConfig:
    """Return the config of a tower; raises InvalidModel, naming the key, as families do."""
    fields = fill_in(fields, _DEFAULTS)
    shape = parse_shaped(fields, activation=_SILU)
    window = fields.integer("window_size", low=1, high=SIDE_MAX) // shape.merge // shape.patch
    if not window:
        raise fields.error("window_size", f"has no place of {shape.side} pixels")
    full = frozenset(listed_layers(fields, _FULL, shape.layers))
    return WindowedConfig(**asdict(shape), window=window, full=full)


def windowed_tensors(tower: WindowedConfig) -> list[TensorSpec]:
    """Return every tensor of a tower that a checkpoint holds."""
    specs, hidden, merged = [patch_weight(tower)], tower.hidden, tower.merged
    shapes = layer_shapes(tower, up=GATED, down=DOWN)
    for index in range(tower.layers):
        prefix = layer_prefix(index)
        specs += [TensorSpec(f"{prefix}{norm}.weight", (hidden,)) for norm in NORMS]
        specs += linear_specs(None, prefix, shapes, joined=GATED)
    specs.append(TensorSpec(f"{MERGER_NORM}.weight", (hidden,)))
    ends = {MERGER[0]: (merged, merged, True), MERGER[1]: (tower.output, merged, True)}
    specs += linear_specs(None, "", ends)
    return [replace(spec, packable=False) for spec in specs]
