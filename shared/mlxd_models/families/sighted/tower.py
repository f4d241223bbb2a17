"""A vision tower: its config, and the tensors of its checkpoints. CLIP's and SigLIP's.

Invariants:
- A tower sees squares of one size, cut into patches; what is left at the edges is not seen.
- Layers behind the one whose rows are the features are in checkpoints and never evaluated: they
  are known by name, and left unread. So are what comes behind all layers (a norm, a pooling head),
  but for the norm where features come from behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.families.common.decoder import HEADS_MAX, LAYERS_MAX, WIDTH_MAX
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import COLOURS, check_colours, fill_in
from mlxd_models.families.common.tensors import TensorSpec, linear_specs
from mlxd_models.sizes.weight_forms import TOWER_PREFIX
from mlxd_shared.config import IMAGES_TOGETHER_MAX

SIDE_MAX: Final = 4096
ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT: Final = "self_attn.out_proj"
UP, DOWN = "mlp.fc1", "mlp.fc2"
PATCHES: Final = f"{TOWER_PREFIX}embeddings.patch_embedding"
PLACES: Final = f"{TOWER_PREFIX}embeddings.position_embedding"
CLASS: Final = f"{TOWER_PREFIX}embeddings.class_embedding"
FIRST_NORM: Final = f"{TOWER_PREFIX}pre_layrnorm"
"""As CLIP's checkpoints spell it."""
LAST_NORM: Final = f"{TOWER_PREFIX}post_layernorm"
SCORES_MAX: Final = 1 << 24
"""Scores of queries and keys that are there at once."""


class TowerActivation(StrEnum):
    """What is between a feed-forward's two products."""

    QUICK_GELU = "quick_gelu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """The shape of a tower: full attention over patches, norms before both halves of a layer."""

    hidden: int
    layers: int
    """Those that are evaluated."""
    stored_layers: int
    heads: int
    mlp: int
    side: int
    """Of an image, in pixels."""
    patch: int
    """Side of a patch, in pixels."""
    norm_eps: float
    activation: TowerActivation
    has_class: bool
    """Whether a row of its own stands before the patches', and a norm before the first layer."""
    ends_normed: bool = False
    """Whether features are rows of the norm behind all layers."""

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.side // self.patch) ** 2

    @property
    def rows(self) -> int:
        """How many rows go through the layers for an image."""
        return self.patches + self.has_class

    @property
    def pass_values(self) -> int:
        """Values alive at most for one image, of as many as are seen at once.

        Residual and norm beside the widest part of a layer: attention with its scores as products,
        exponentials and sums, of which all images share `SCORES_MAX`, or the feed-forward before
        and behind its activation.
        """
        scores = min(self.heads * self.rows**2, SCORES_MAX // IMAGES_TOGETHER_MAX)
        attention = self.rows * 5 * self.hidden + 3 * scores
        return self.rows * 2 * self.hidden + max(attention, self.rows * 3 * self.mlp)

    @property
    def settled_values(self) -> int:
        """Values alive at most for one image where each part is evaluated before the next.

        Beside its pixels as floats the widest of: them cut into patches; attention from its queries
        to its sums with the scores; the feed-forward around its activation. That much was measured.
        """
        return self._pixels + self._settled_part

    @property
    def float_values(self) -> int:
        """How many of those are float32, of whatever type the weights are: an image's pixels.

        While they are scaled they are there twice, which in 16 bits may be all there is at most.
        """
        twice = 2 * self._pixels - (self._settled_part - self._cut)
        return max(self._pixels, twice)

    @property
    def _pixels(self) -> int:
        return COLOURS * self.side**2

    @property
    def _cut(self) -> int:
        return self._pixels + self.rows * self.hidden

    @property
    def _settled_part(self) -> int:
        attention = self.rows * 9 * self.hidden + min(self.heads * self.rows**2, SCORES_MAX)
        return max(self._cut, attention, self.rows * (2 * self.hidden + 2 * self.mlp))


_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "clip_vision_model": MappingProxyType(
            {
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                "num_attention_heads": 12, "image_size": 224, "patch_size": 32,
                "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
            }
        ),
        "siglip_vision_model": MappingProxyType(
            {
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                "num_attention_heads": 12, "image_size": 224, "patch_size": 16,
                "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
            }
        ),
    }
)  # fmt: skip
"""What published configs leave out, by kind of tower."""


def parse_tower(fields: Fields, *, feature_layer: int, ends_normed: bool = False) -> TowerConfig:
    """Return the config of a tower; raises InvalidModel, naming the key, as families do.

    feature_layer: whose rows are the features: 0 is what the first layer is given, -1 what the last
    one makes. ends_normed: whether they go through the norm behind all layers.
    """
    kind = fields.values.get("model_type")
    if kind not in _DEFAULTS:
        known = ", ".join(sorted(_DEFAULTS))
        raise fields.error("model_type", f"{kind!r} is not a tower that is known: {known}")
    fields = fill_in(fields, _DEFAULTS[str(kind)])
    check_colours(fields, "num_channels")
    layers = fields.integer("num_hidden_layers", low=1, high=LAYERS_MAX)
    if not -layers - 1 <= feature_layer <= layers:
        raise fields.error("num_hidden_layers", f"{layers} layers have no output {feature_layer}")
    hidden = fields.integer("hidden_size", low=1, high=WIDTH_MAX)
    heads = fields.integer("num_attention_heads", low=1, high=HEADS_MAX)
    if hidden % heads:
        raise fields.error("num_attention_heads", f"{heads} do not divide {hidden}")
    side = fields.integer("image_size", low=1, high=SIDE_MAX)
    activation = fields.values.get("hidden_act")
    if activation not in tuple(TowerActivation):
        known = ", ".join(TowerActivation)
        raise fields.error("hidden_act", f"{activation!r} is not one of {known}")
    return TowerConfig(
        hidden=hidden,
        layers=feature_layer if feature_layer >= 0 else layers + 1 + feature_layer,
        stored_layers=layers,
        heads=heads,
        mlp=fields.integer("intermediate_size", low=1, high=WIDTH_MAX),
        side=side,
        patch=fields.integer("patch_size", low=1, high=side),
        norm_eps=fields.positive("layer_norm_eps"),
        activation=TowerActivation(activation),
        has_class=kind == "clip_vision_model",
        ends_normed=ends_normed,
    )


def tower_layer(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{TOWER_PREFIX}encoder.layers.{index}."


def tower_tensors(tower: TowerConfig) -> list[TensorSpec]:
    """Return every tensor of a tower that a checkpoint holds, but for what `tower_name` drops."""
    hidden, mlp, patch = tower.hidden, tower.mlp, tower.patch
    shape = (hidden, COLOURS, patch, patch)
    other = (hidden, patch, patch, COLOURS)
    specs = [
        TensorSpec(f"{PATCHES}.weight", shape, other_shape=other),
        TensorSpec(f"{PLACES}.weight", (tower.rows, hidden)),
    ]
    if tower.has_class:
        specs.append(TensorSpec(CLASS, (hidden,)))
        specs += norm_specs(FIRST_NORM, hidden)
    else:
        specs.append(TensorSpec(f"{PATCHES}.bias", (hidden,)))
    if tower.ends_normed:
        specs += norm_specs(LAST_NORM, hidden)
    for index in range(tower.stored_layers):
        prefix = tower_layer(index)
        shapes = dict.fromkeys((*ATTENTION, OUTPUT), (hidden, hidden, True))
        shapes |= {UP: (mlp, hidden, True), DOWN: (hidden, mlp, True)}
        layer = [
            *linear_specs(None, prefix, shapes, joined=ATTENTION),
            *norm_specs(f"{prefix}layer_norm1", hidden),
            *norm_specs(f"{prefix}layer_norm2", hidden),
        ]
        used = index < tower.layers
        specs += [replace(spec, required=used, packable=False) for spec in layer]
    return specs


def tower_name(name: str, *, ends_normed: bool = False) -> str | None:
    """Return how `tower_tensors` calls a tower's tensor; None for one that is never evaluated.

    name: behind `TOWER_PREFIX`, as a checkpoint has it. ends_normed: as of `parse_tower`.
    """
    own = name.removeprefix("vision_model.")
    if own.startswith("post_layernorm.") and not ends_normed:
        return None
    if own.startswith("head.") or own.endswith(".position_ids"):
        return None
    return TOWER_PREFIX + own


def norm_specs(stem: str, width: int) -> list[TensorSpec]:
    """Return the weight and the bias of a layer norm."""
    return [TensorSpec(f"{stem}.{part}", (width,)) for part in ("weight", "bias")]
