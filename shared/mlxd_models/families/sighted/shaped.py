"""What towers that keep an image's shape have in common: sizes, and tensors by name.

Invariants:
- Where a patch is, rotations by its row and its column say.
- A square of `merge` x `merge` patches becomes one place of the prompt. An image is no film: each
  of the `frames` that a patch has is the same picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mlxd_models.families.common.decoder import HEADS_MAX, LAYERS_MAX, WIDTH_MAX
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import (
    COLOURS,
    FRAMES_MAX,
    MERGE_MAX,
    check_colours,
)
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.sighted.tower import SIDE_MAX
from mlxd_models.sizes.weight_forms import TOWER_PREFIX

QKV, OUTPUT = "attn.qkv", "attn.proj"
NORMS: Final = ("norm1", "norm2")
"""Before attention, and before the feed-forward."""
PATCHES: Final = f"{TOWER_PREFIX}patch_embed.proj"
NORM_EPS: Final = 1e-6
BASE_DEFAULT: Final = 10_000.0
_AXIAL: Final = "axial"


@dataclass(frozen=True, slots=True)
class ShapedConfig:
    """The shape of a tower, whatever its layers are."""

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
    output: int
    """Values of a place; where deep layers give more, at each level."""
    base: float
    """Of the rotations by a patch's row and by its column."""

    @property
    def side(self) -> int:
        """Side of a place, in pixels."""
        return self.patch * self.merge

    @property
    def patch_values(self) -> int:
        """Values of a patch, in all frames."""
        return COLOURS * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """Values of the patches of a place, side by side."""
        return self.hidden * self.merge**2

    @property
    def pixels_and_turns(self) -> int:
        """Values that are there for each patch through all layers, of whatever type weights are.

        Its pixels in float32 and in 8 bits, its angles, their cosines and sines, and where it lies.
        """
        turns = 3 * self.hidden // (2 * self.heads)
        return 5 * COLOURS * self.patch**2 // 4 + turns + 1

    def float_values_of(self, places: int) -> int:
        """Return how many of the values alive at most are float32, of whatever type weights are.

        For an image of so many places: pixels, turns, and queries or keys while they are turned.
        """
        return places * self.merge**2 * (self.pixels_and_turns + 4 * self.hidden)


def parse_shaped(fields: Fields, *, activation: str) -> ShapedConfig:
    """Return what every such tower's config says; raises InvalidModel, naming the key.

    activation: the only one that is supported.
    """
    check_colours(fields, "in_channels", "in_chans")
    fields.demand("hidden_act", activation)
    layers = fields.integer("depth", low=1, high=LAYERS_MAX)
    hidden = fields.integer("hidden_size", low=1, high=WIDTH_MAX)
    heads = fields.integer("num_heads", low=1, high=HEADS_MAX)
    if hidden % (4 * heads):
        problem = f"{heads} heads do not divide {hidden} into multiples of 4, to turn by two axes"
        raise fields.error("num_heads", problem)
    return ShapedConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        mlp=fields.integer("intermediate_size", low=1, high=WIDTH_MAX),
        patch=fields.integer("patch_size", low=1, high=SIDE_MAX),
        merge=fields.integer("spatial_merge_size", low=1, high=MERGE_MAX),
        frames=fields.integer("temporal_patch_size", low=1, high=FRAMES_MAX),
        output=fields.integer("out_hidden_size", low=1, high=WIDTH_MAX),
        base=_rope_base(fields),
    )


def _rope_base(fields: Fields) -> float:
    """Return the base of a tower's rotations; raises InvalidModel for another kind of them."""
    if not fields.has("rope_parameters"):
        return BASE_DEFAULT
    rope = fields.part("rope_parameters")
    rope.demand("rope_type", _AXIAL)
    return rope.positive("rope_theta", default=BASE_DEFAULT)


def listed_layers(fields: Fields, key: str, layers: int) -> tuple[int, ...]:
    """Return the layers that a key lists, of so many; raises InvalidModel for any other value."""
    stated = fields.values[key]
    if not isinstance(stated, list | tuple) or any(type(index) is not int for index in stated):
        raise fields.error(key, f"{stated!r} is not a list of layers")
    beyond = [index for index in stated if not 0 <= index < layers]
    if beyond:
        raise fields.error(key, f"{beyond[0]} is not one of {layers} layers")
    return tuple(stated)


def layer_prefix(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{TOWER_PREFIX}blocks.{index}."


def patch_weight(tower: ShapedConfig) -> TensorSpec:
    """Return the weight over a patch's values."""
    hidden, patch, frames = tower.hidden, tower.patch, tower.frames
    shape = (hidden, COLOURS, frames, patch, patch)
    other = (hidden, frames, patch, patch, COLOURS)
    return TensorSpec(f"{PATCHES}.weight", shape, other_shape=other)


def layer_shapes(
    tower: ShapedConfig, *, up: tuple[str, ...], down: str
) -> Mapping[str, tuple[int, int, bool]]:
    """Return the linears of a layer, as `linear_specs` takes them.

    up, down: what those of its feed-forward are called.
    """
    hidden, mlp = tower.hidden, tower.mlp
    shapes = {QKV: (3 * hidden, hidden, True), OUTPUT: (hidden, hidden, True)}
    return shapes | dict.fromkeys(up, (mlp, hidden, True)) | {down: (hidden, mlp, True)}
