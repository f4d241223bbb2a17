"""Gemma 3: a SigLIP tower whose patches are averaged to places, and the text that reads them.

Invariants:
- An image takes `mm_tokens_per_image` places: squares of patches, averaged behind the tower's last
  norm, then normed and projected. A template writes the token before them alone.
- Places of one image see each other, both ways, in every layer; so a pass has all of them.
- A checkpoint that holds nothing of a tower, as mlx-lm converts them, is the text alone; so is one
  without what says how images are made ready.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig, llama_tensors
from mlxd_models.families.common.family import Family, Footprint, llama_footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import place_token, tower_fields
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.gemma3 import GEMMA3_NESTED, parse_nested_gemma3
from mlxd_models.families.sighted.tower import (
    TowerConfig,
    parse_tower,
    tower_name,
    tower_tensors,
)
from mlxd_models.files.nested_text import text_name
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_models.sizes.weight_forms import TOWER_PREFIX
from mlxd_shared.config import IMAGE_WHOLE_TOKENS_MAX

PROJECTOR: Final = "multi_modal_projector."
PROJECTION: Final = f"{PROJECTOR}mm_input_projection_weight"
"""[values of a patch's row, values of the text's]: rows are multiplied from the left."""
PLACE_NORM: Final = f"{PROJECTOR}mm_soft_emb_norm.weight"
_TOWER_KIND: Final = "siglip_vision_model"
_PLACES: Final = "mm_tokens_per_image"
_PLACES_DEFAULT: Final = 256
_PLACE_KEYS: Final = ("image_token_index", "image_token_id")
_BEFORE_KEYS: Final = ("boi_token_index", "boi_token_id")
_BEHIND_KEYS: Final = ("eoi_token_index", "eoi_token_id")
_PLACE_DEFAULT, _BEFORE_DEFAULT, _BEHIND_DEFAULT = 262_144, 255_999, 256_000


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    """The shape of a Gemma 3 that sees."""

    text: DecoderConfig
    tower: TowerConfig
    across: int
    """Places of an image to a side."""
    token_id: int
    marks: tuple[int, int]
    """The tokens before and behind an image's places."""

    @property
    def tokens(self) -> int:
        """How many places an image takes."""
        return self.across**2

    @property
    def pooled(self) -> int:
        """Patches to a side of a place."""
        return self.tower.side // self.tower.patch // self.across

    def within(self, context: int) -> Gemma3Config:
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, text=self.text.within(context))


def parse_seeing_gemma3(config: Mapping[str, Any]) -> Gemma3Config:
    """Return the config of a `Gemma3ForConditionalGeneration` with its tower."""
    fields = Fields(config)
    text = parse_nested_gemma3(config)
    vision = tower_fields(fields)
    kind = vision.values.get("model_type", _TOWER_KIND)
    if kind != _TOWER_KIND:
        raise vision.error("model_type", f"{kind!r} is not supported, only {_TOWER_KIND!r}")
    vision = Fields({**vision.values, "model_type": kind}, vision.prefix)
    tower = parse_tower(vision, feature_layer=-1, ends_normed=True)
    token_id, before, behind = (
        place_token(fields, *keys, vocab=text.vocab, default=default)
        for keys, default in (
            (_PLACE_KEYS, _PLACE_DEFAULT),
            (_BEFORE_KEYS, _BEFORE_DEFAULT),
            (_BEHIND_KEYS, _BEHIND_DEFAULT),
        )
    )
    if len({token_id, before, behind}) < 3:
        raise fields.error(_PLACE_KEYS[0], f"{token_id} is also what an image begins or ends with")
    return Gemma3Config(text, tower, _across(fields, tower), token_id, (before, behind))


def _across(fields: Fields, tower: TowerConfig) -> int:
    """Return the places of an image to a side: its patches in squares, each averaged."""
    tokens = fields.integer(_PLACES, low=1, high=IMAGE_WHOLE_TOKENS_MAX, default=_PLACES_DEFAULT)
    across, patches = math.isqrt(tokens), tower.side // tower.patch
    if across**2 != tokens or across > patches or patches // (patches // across) != across:
        problem = f"{patches} x {patches} patches cannot be averaged to {tokens} places"
        raise fields.error(_PLACES, problem)
    return across


def seeing_gemma3_tensors(config: Gemma3Config) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    seen = config.tower.hidden
    projector = (
        TensorSpec(PROJECTION, (seen, config.text.hidden)),
        TensorSpec(PLACE_NORM, (seen,)),
    )
    return (*llama_tensors(config.text), *tower_tensors(config.tower), *projector)


def seeing_gemma3_footprint(config: Gemma3Config) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    tower, tokens = config.tower, config.tokens
    # Rows and their norm beside what becomes of them: averages, their norm and the projection.
    pooling = 2 * tower.rows * tower.hidden + tokens * (2 * tower.hidden + config.text.hidden)
    sight = SightSizes(
        token_id=config.token_id,
        tokens=tokens,
        side=tower.side,
        hidden=config.text.hidden,
        pass_values=max(tower.pass_values, pooling),
        settled_values=max(tower.settled_values, pooling),
        float_values=tower.float_values,
        whole=True,
        marks=config.marks,
    )
    return replace(llama_footprint(config.text), sight=sight)


def seeing_gemma3_name(name: str) -> str | None:
    """Return how `seeing_gemma3_tensors` calls a stored tensor; None for one left unread."""
    own = name.removeprefix("model.")
    if own.startswith(TOWER_PREFIX):
        return tower_name(own.removeprefix(TOWER_PREFIX), ends_normed=True)
    return own if own.startswith(PROJECTOR) else text_name(name)


SEEING_GEMMA3: Final = Family(
    "mlxd_worker.models.families.gemma3",
    parse_seeing_gemma3,
    seeing_gemma3_tensors,
    seeing_gemma3_footprint,
    name_of=seeing_gemma3_name,
    blind=GEMMA3_NESTED,
)
