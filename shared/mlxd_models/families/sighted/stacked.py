"""A tower that keeps an image's shape and gives more than its last layer: Qwen3-VL's, Qwen3.5's.

Invariants:
- All patches of an image see each other in every layer.
- Where a patch is, is said twice: by a learned table, laid over any shape of image, and by
  rotations.
- What some layers leave (`deep`) becomes values of a place too, each by a merger of its own
  (DeepStack, Meng et al., 2024): `levels` times as many behind the first ones. Qwen3.5 has none.
- Layers have layer norms before both halves, and feed-forwards with GELU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import COLOURS, fill_in
from mlxd_models.families.common.tensors import TensorSpec, linear_specs
from mlxd_models.families.sighted.shaped import (
    NORMS,
    PATCHES,
    ShapedConfig,
    layer_prefix,
    layer_shapes,
    listed_layers,
    parse_shaped,
    patch_weight,
)
from mlxd_models.families.sighted.tower import SCORES_MAX, SIDE_MAX, norm_specs
from mlxd_models.sizes.weight_forms import TOWER_PREFIX

UP, DOWN = "mlp.linear_fc1", "mlp.linear_fc2"
TABLE: Final = f"{TOWER_PREFIX}pos_embed"
MERGER: Final = f"{TOWER_PREFIX}merger."
MERGER_NORM: Final = "norm"
MERGER_LINEARS: Final = ("linear_fc1", "linear_fc2")
TABLE_MAX: Final = SIDE_MAX**2
DEEP: Final = "deepstack_visual_indexes"
_TABLE: Final = "num_position_embeddings"
_GELU: Final = "gelu_pytorch_tanh"

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": 3584, _TABLE: 2304,
    }
)  # fmt: skip
"""What published configs may leave out."""


@dataclass(frozen=True, slots=True)
class StackedConfig(ShapedConfig):
    """The shape of a tower."""

    table: int
    """Side of the square of learned positions."""
    deep: tuple[int, ...]
    """The layers, ascending, of which more is given than goes through the others."""

    @property
    def levels(self) -> int:
        """How many layers' values a place has besides the last one's."""
        return len(self.deep)

    def pass_values_of(self, places: int) -> int:
        """Return the values alive at most for an image of so many places.

        Its patches before they are embedded; or the learned positions as they are laid, in float32;
        or pixels, residual, norm and angles beside the widest part of a layer: attention, around
        its rotations, with scores as products, exponentials and sums, or the feed-forward around
        its activation, or the places around a merger's products; and what the levels before have
        made.
        """
        rows = places * self.merge**2
        embedding = rows * (3 * self.patch_values + self.hidden)
        scores = min(self.heads * rows**2, SCORES_MAX)
        attention = rows * 16 * self.hidden + 3 * scores
        held = rows * (3 * self.hidden + COLOURS * self.patch**2)
        held += 2 * (1 + self.levels) * places * self.output
        widest = max(self._laying(rows), attention, rows * 8 * self.mlp, self._merging(places))
        return max(embedding, held + widest)

    def settled_values_of(self, places: int) -> int:
        """Return the same for so many places where each part is evaluated before the next.

        The widest of: patches, cut and laid out; beside pixels and what levels have made, the
        learned positions; attention from its queries and angles to its sums with the scores; the
        feed-forward around its activation; a merger. That much was measured.
        """
        rows = places * self.merge**2
        pixels = COLOURS * self.patch**2
        embedding = rows * (2 * self.patch_values + pixels // 4 + self.hidden)
        scores = min(self.heads * rows**2, SCORES_MAX)
        attention = rows * (8 * self.hidden + 2 * self.hidden // self.heads) + scores
        forward = rows * (3 * self.hidden + 2 * self.mlp)
        held = rows * pixels + 2 * (1 + self.levels) * places * self.output
        widest = max(self._laying(rows), attention, forward, self._merging(places))
        return max(embedding, held + widest)

    def _laying(self, rows: int) -> int:
        """Return the values alive while learned positions are laid over so many patches."""
        return rows * 10 * self.hidden + 4 * self.table * rows * self.hidden // self._least(rows)

    def _merging(self, places: int) -> int:
        """Return the values alive around a merger's products."""
        return places * (6 * self.merged + 2 * self.output)

    def _least(self, rows: int) -> int:
        """Return how many patches the shorter side of an image of so many has, if a square."""
        return max(math.isqrt(rows), 1)


def parse_stacked(fields: Fields, *, deep: tuple[int, ...] = ()) -> StackedConfig:
    """Return the config of a tower; raises InvalidModel, naming the key, as families do.

    deep: its deep layers where they are not stated.
    """
    fields = fill_in(fields, {**_DEFAULTS, DEEP: deep})
    shape = parse_shaped(fields, activation=_GELU)
    positions = fields.integer(_TABLE, low=1, high=TABLE_MAX)
    table = math.isqrt(positions)
    if table**2 != positions:
        raise fields.error(_TABLE, f"{positions} is no square")
    listed = listed_layers(fields, DEEP, shape.layers)
    if list(listed) != sorted(set(listed)):
        raise fields.error(DEEP, f"{list(listed)} do not ascend")
    return StackedConfig(**asdict(shape), table=table, deep=listed)


def level_merger(level: int) -> str:
    """Return what the names of a deep level's merger begin with."""
    return f"{TOWER_PREFIX}deepstack_merger_list.{level}."


def stacked_tensors(tower: StackedConfig) -> list[TensorSpec]:
    """Return every tensor of a tower that a checkpoint holds."""
    hidden = tower.hidden
    specs = [
        patch_weight(tower),
        TensorSpec(f"{PATCHES}.bias", (hidden,)),
        TensorSpec(f"{TABLE}.weight", (tower.table**2, hidden)),
    ]
    shapes = layer_shapes(tower, up=(UP,), down=DOWN)
    for index in range(tower.layers):
        prefix = layer_prefix(index)
        specs += [spec for norm in NORMS for spec in norm_specs(prefix + norm, hidden)]
        specs += linear_specs(None, prefix, shapes)
    specs += _merger_specs(tower, MERGER, normed=hidden)
    for level in range(tower.levels):
        specs += _merger_specs(tower, level_merger(level), normed=tower.merged)
    return [replace(spec, packable=False) for spec in specs]


def _merger_specs(tower: StackedConfig, prefix: str, *, normed: int) -> list[TensorSpec]:
    """Return a merger's tensors; normed: how many values its norm is over."""
    merged = tower.merged
    first, second = MERGER_LINEARS
    shapes = {first: (merged, merged, True), second: (tower.output, merged, True)}
    return [*norm_specs(prefix + MERGER_NORM, normed), *linear_specs(None, prefix, shapes)]
