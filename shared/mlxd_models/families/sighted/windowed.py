"""A tower that keeps an image's shape: its config, and its checkpoints' tensors. Qwen2.5-VL's.

Invariants:
- Patches attend within windows of whole places, but for a few layers in which all see all.
- A square of `merge` x `merge` patches becomes one place of the prompt. An image is no film: each
  of the `frames` that a patch has is the same picture.
- The most places that an image takes are `IMAGE_PLACES_MAX`, whatever a model's files allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.families.common.decoder import HEADS_MAX, LAYERS_MAX, WIDTH_MAX
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.tensors import TensorSpec, linear_specs
from mlxd_models.families.sighted.tower import COLOURS, SCORES_MAX, SIDE_MAX
from mlxd_models.sizes.weight_forms import TOWER_PREFIX
from mlxd_shared import config

QKV, OUTPUT = "attn.qkv", "attn.proj"
GATED, DOWN = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
NORMS: Final = ("norm1", "norm2")
"""Before attention, and before the feed-forward."""
PATCHES: Final = f"{TOWER_PREFIX}patch_embed.proj"
MERGER_NORM: Final = f"{TOWER_PREFIX}merger.ln_q"
MERGER: Final = (f"{TOWER_PREFIX}merger.mlp.0", f"{TOWER_PREFIX}merger.mlp.2")
NORM_EPS: Final = 1e-6
MERGE_MAX: Final = 16
FRAMES_MAX: Final = 16
BASE_DEFAULT: Final = 10_000.0
_SILU: Final = "silu"
_AXIAL: Final = "axial"

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "out_hidden_size": 3584, "fullatt_block_indexes": (7, 15, 23, 31),
    }
)  # fmt: skip
"""What published configs may leave out."""


@dataclass(frozen=True, slots=True)
class WindowedConfig:
    """The shape of a tower: RMS norms before both halves of a layer, gated feed-forwards."""

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
    window: int
    """Places to a side of a window."""
    full: frozenset[int]
    """The layers in which all patches of an image see each other."""
    output: int
    """Values of a feature."""
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
    def pass_values(self) -> int:
        """Values alive at most for the largest image."""
        return self.pass_values_of(config.IMAGE_PLACES_MAX)

    def pass_values_of(self, places: int) -> int:
        """Return the values alive at most for an image of so many places.

        Its patches before they are embedded; or pixels, residual, norm and angles beside the widest
        part of a layer: attention, around its rotations, with scores as products, exponentials and
        sums, or the feed-forward around its activation; or the places around the merger's
        products. MLX makes room for all that is evaluated together.
        """
        rows = places * self.merge**2
        embedding = rows * (3 * self.patch_values + self.hidden)
        seen = rows if self.full else min(rows, (self.window * self.merge) ** 2)
        scores = min(self.heads * rows * seen, SCORES_MAX)
        attention = rows * 16 * self.hidden + 3 * scores
        held = rows * (3 * self.hidden + COLOURS * self.patch**2)
        layer = held + max(attention, rows * 5 * self.mlp)
        merging = rows * self.hidden + places * (3 * self.merged + 2 * self.output)
        return max(embedding, layer, merging)

    @property
    def settled_values(self) -> int:
        """Values alive at most for the largest image on a CPU."""
        return self.settled_values_of(config.IMAGE_PLACES_MAX)

    def settled_values_of(self, places: int) -> int:
        """Return the same for so many places where each part is evaluated before the next.

        The widest of: patches, cut and laid out; beside pixels and residual, attention from its
        queries to its sums with the scores, or the feed-forward; the merger. That much was
        measured.
        """
        rows = places * self.merge**2
        pixels = 5 * COLOURS * self.patch**2 // 4  # as floats, and in 8 bits
        embedding = rows * (27 * self.patch_values // 10 + self.hidden)
        seen = rows if self.full else min(rows, (self.window * self.merge) ** 2)
        scores = min(self.heads * rows * seen, SCORES_MAX)
        attention = rows * 9 * self.hidden + scores
        layer = rows * (3 * self.hidden + pixels) + max(attention, rows * 5 * self.mlp)
        merging = rows * self.hidden + places * (3 * self.merged + 2 * self.output)
        return max(embedding, layer, merging)


def parse_windowed(fields: Fields) -> WindowedConfig:
    """Return the config of a tower; raises InvalidModel, naming the key, as families do."""
    stated = {key: value for key, value in fields.values.items() if value is not None}
    fields = Fields({**_DEFAULTS, **stated}, fields.prefix)
    check_colours(fields)
    fields.demand("hidden_act", _SILU)
    layers = fields.integer("depth", low=1, high=LAYERS_MAX)
    hidden = fields.integer("hidden_size", low=1, high=WIDTH_MAX)
    heads = fields.integer("num_heads", low=1, high=HEADS_MAX)
    if hidden % (4 * heads):
        problem = f"{heads} heads do not divide {hidden} into multiples of 4, to turn by two axes"
        raise fields.error("num_heads", problem)
    patch = fields.integer("patch_size", low=1, high=SIDE_MAX)
    merge = fields.integer("spatial_merge_size", low=1, high=MERGE_MAX)
    window = fields.integer("window_size", low=1, high=SIDE_MAX) // merge // patch
    if not window:
        raise fields.error("window_size", f"has no place of {patch * merge} pixels")
    return WindowedConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        mlp=fields.integer("intermediate_size", low=1, high=WIDTH_MAX),
        patch=patch,
        merge=merge,
        frames=fields.integer("temporal_patch_size", low=1, high=FRAMES_MAX),
        window=window,
        full=_full_layers(fields, layers),
        output=fields.integer("out_hidden_size", low=1, high=WIDTH_MAX),
        base=rope_base(fields),
    )


def _full_layers(fields: Fields, layers: int) -> frozenset[int]:
    key = "fullatt_block_indexes"
    stated = fields.values[key]
    if not isinstance(stated, list | tuple) or any(type(index) is not int for index in stated):
        raise fields.error(key, f"{stated!r} is not a list of layers")
    beyond = [index for index in stated if not 0 <= index < layers]
    if beyond:
        raise fields.error(key, f"{beyond[0]} is not one of {layers} layers")
    return frozenset(stated)


def check_colours(fields: Fields) -> None:
    """Refuse another number of colours, by either of its names."""
    for key in ("in_channels", "in_chans"):
        if fields.integer(key, low=1, high=WIDTH_MAX, default=COLOURS) != COLOURS:
            raise fields.error(key, f"only {COLOURS} are supported")


def rope_base(fields: Fields) -> float:
    """Return the base of a tower's rotations; raises InvalidModel for another kind of them."""
    if not fields.has("rope_parameters"):
        return BASE_DEFAULT
    rope = fields.part("rope_parameters")
    rope.demand("rope_type", _AXIAL)
    return rope.positive("rope_theta", default=BASE_DEFAULT)


def windowed_layer(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{TOWER_PREFIX}blocks.{index}."


def windowed_tensors(tower: WindowedConfig) -> list[TensorSpec]:
    """Return every tensor of a tower that a checkpoint holds."""
    hidden, mlp, patch, frames = tower.hidden, tower.mlp, tower.patch, tower.frames
    shape = (hidden, COLOURS, frames, patch, patch)
    other = (hidden, frames, patch, patch, COLOURS)
    specs = [TensorSpec(f"{PATCHES}.weight", shape, other_shape=other)]
    shapes = {QKV: (3 * hidden, hidden, True), OUTPUT: (hidden, hidden, True)}
    shapes |= dict.fromkeys(GATED, (mlp, hidden, True)) | {DOWN: (hidden, mlp, True)}
    for index in range(tower.layers):
        prefix = windowed_layer(index)
        specs += [TensorSpec(f"{prefix}{norm}.weight", (hidden,)) for norm in NORMS]
        specs += linear_specs(None, prefix, shapes, joined=GATED)
    specs.append(TensorSpec(f"{MERGER_NORM}.weight", (hidden,)))
    merged = tower.merged
    ends = {MERGER[0]: (merged, merged, True), MERGER[1]: (tower.output, merged, True)}
    specs += linear_specs(None, "", ends)
    return [replace(spec, packable=False) for spec in specs]
