"""A tower that keeps an image's shape and gives more than its last layer: Qwen3-VL's, Qwen3.5's.

Invariants:
- All patches of an image see each other in every layer.
- Where a patch is, is said twice: by a learned table, laid over any shape of image, and by
  rotations by row and column.
- A square of `merge` x `merge` patches becomes one place of the prompt. What some layers leave
  (`deep`) becomes values of that place too, each by a merger of its own (DeepStack, Meng et al.,
  2024): `levels` times as many behind the first ones. Qwen3.5 has none.
- The most places that an image takes are `IMAGE_PLACES_MAX`, whatever a model's files allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.families.common.decoder import HEADS_MAX, LAYERS_MAX, WIDTH_MAX
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.tensors import TensorSpec, linear_specs
from mlxd_models.families.sighted.tower import COLOURS, SCORES_MAX, SIDE_MAX
from mlxd_models.families.sighted.windowed import (
    FRAMES_MAX,
    MERGE_MAX,
    NORMS,
    OUTPUT,
    PATCHES,
    QKV,
    check_colours,
    rope_base,
    windowed_layer,
)
from mlxd_models.sizes.weight_forms import TOWER_PREFIX
from mlxd_shared import config

UP, DOWN = "mlp.linear_fc1", "mlp.linear_fc2"
TABLE: Final = f"{TOWER_PREFIX}pos_embed"
MERGER: Final = f"{TOWER_PREFIX}merger."
MERGER_NORM: Final = "norm"
MERGER_LINEARS: Final = ("linear_fc1", "linear_fc2")
NORM_EPS: Final = 1e-6
TABLE_MAX: Final = SIDE_MAX**2
_DEEP: Final = "deepstack_visual_indexes"
_GELU: Final = "gelu_pytorch_tanh"

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": 3584, "num_position_embeddings": 2304, "hidden_act": _GELU,
    }
)  # fmt: skip
"""What published configs may leave out."""


@dataclass(frozen=True, slots=True)
class StackedConfig:
    """The shape of a tower: layer norms before both halves of a layer, feed-forwards with GELU."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    patch: int
    """Side of a patch, in pixels."""
    merge: int
    """Patches to a side of a place."""
    frames: int
    """How many pictures a patch has, one behind another."""
    table: int
    """Side of the square of learned positions."""
    deep: tuple[int, ...]
    """The layers, ascending, of which more is given than goes through the others."""
    output: int
    """Values of a place, at each level."""
    base: float
    """Of the rotations by a patch's row and by its column."""

    @property
    def side(self) -> int:
        """Side of a place, in pixels."""
        return self.patch * self.merge

    @property
    def levels(self) -> int:
        """How many layers' values a place has besides the last one's."""
        return len(self.deep)

    @property
    def patch_values(self) -> int:
        """Values of a patch, in all frames."""
        return COLOURS * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """Values of the patches of a place, side by side."""
        return self.hidden * self.merge**2

    @property
    def pass_values(self) -> int:
        """Values alive at most for the largest image."""
        return self.pass_values_of(config.IMAGE_PLACES_MAX)

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
        laying = rows * 10 * self.hidden + 4 * self.table * rows * self.hidden // self._least(rows)
        scores = min(self.heads * rows**2, SCORES_MAX)
        attention = rows * 16 * self.hidden + 3 * scores
        merging = places * (6 * self.merged + 2 * self.output)
        held = rows * (3 * self.hidden + COLOURS * self.patch**2)
        held += 2 * (1 + self.levels) * places * self.output
        return max(embedding, held + max(laying, attention, rows * 8 * self.mlp, merging))

    def _least(self, rows: int) -> int:
        """Return how many patches the shorter side of an image of so many has, if a square."""
        return max(math.isqrt(rows), 1)


def parse_stacked(fields: Fields, *, deep: tuple[int, ...] = ()) -> StackedConfig:
    """Return the config of a tower; raises InvalidModel, naming the key, as families do.

    deep: its deep layers where they are not stated.
    """
    stated = {key: value for key, value in fields.values.items() if value is not None}
    fields = Fields({**_DEFAULTS, _DEEP: deep, **stated}, fields.prefix)
    check_colours(fields)
    fields.demand("hidden_act", _GELU)
    layers = fields.integer("depth", low=1, high=LAYERS_MAX)
    hidden = fields.integer("hidden_size", low=1, high=WIDTH_MAX)
    heads = fields.integer("num_heads", low=1, high=HEADS_MAX)
    if hidden % (4 * heads):
        problem = f"{heads} heads do not divide {hidden} into multiples of 4, to turn by two axes"
        raise fields.error("num_heads", problem)
    positions = fields.integer("num_position_embeddings", low=1, high=TABLE_MAX)
    if math.isqrt(positions) ** 2 != positions:
        raise fields.error("num_position_embeddings", f"{positions} is no square")
    return StackedConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        mlp=fields.integer("intermediate_size", low=1, high=WIDTH_MAX),
        patch=fields.integer("patch_size", low=1, high=SIDE_MAX),
        merge=fields.integer("spatial_merge_size", low=1, high=MERGE_MAX),
        frames=fields.integer("temporal_patch_size", low=1, high=FRAMES_MAX),
        table=math.isqrt(positions),
        deep=_deep_layers(fields, layers),
        output=fields.integer("out_hidden_size", low=1, high=WIDTH_MAX),
        base=rope_base(fields),
    )


def _deep_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    key = _DEEP
    stated = fields.values[key]
    if not isinstance(stated, list | tuple) or any(type(index) is not int for index in stated):
        raise fields.error(key, f"{stated!r} is not a list of layers")
    beyond = [index for index in stated if not 0 <= index < layers]
    if beyond:
        raise fields.error(key, f"{beyond[0]} is not one of {layers} layers")
    if list(stated) != sorted(set(stated)):
        raise fields.error(key, f"{list(stated)} do not ascend")
    return tuple(stated)


def level_merger(level: int) -> str:
    """Return what the names of a deep level's merger begin with."""
    return f"{TOWER_PREFIX}deepstack_merger_list.{level}."


def stacked_tensors(tower: StackedConfig) -> list[TensorSpec]:
    """Return every tensor of a tower that a checkpoint holds."""
    hidden, mlp, patch, frames = tower.hidden, tower.mlp, tower.patch, tower.frames
    shape = (hidden, COLOURS, frames, patch, patch)
    other = (hidden, frames, patch, patch, COLOURS)
    specs = [
        TensorSpec(f"{PATCHES}.weight", shape, other_shape=other),
        TensorSpec(f"{PATCHES}.bias", (hidden,)),
        TensorSpec(f"{TABLE}.weight", (tower.table**2, hidden)),
    ]
    shapes = {QKV: (3 * hidden, hidden, True), OUTPUT: (hidden, hidden, True)}
    shapes |= {UP: (mlp, hidden, True), DOWN: (hidden, mlp, True)}
    for index in range(tower.layers):
        prefix = windowed_layer(index)
        specs += [spec for norm in NORMS for spec in _norm_specs(prefix + norm, hidden)]
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
    return [*_norm_specs(prefix + MERGER_NORM, normed), *linear_specs(None, prefix, shapes)]


def _norm_specs(stem: str, width: int) -> list[TensorSpec]:
    return [TensorSpec(f"{stem}.{part}", (width,)) for part in ("weight", "bias")]
