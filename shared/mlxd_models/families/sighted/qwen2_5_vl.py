"""Qwen2.5-VL: a Qwen2 that reads what a windowed tower makes of images, each in its own shape.

Invariants:
- Images alone: of a film nothing is known here, and a request has no field for one.
- Tokens turn by three axes (`RopeConfig.sections`): a text's by one number on all of them, an
  image's places by their row and column.
- The text's config lies flat in config.json, as it was published, or under `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from mlxd_models.families.common.decoder import VOCAB_MAX, DecoderConfig, llama_tensors
from mlxd_models.families.common.family import Family, Footprint, llama_footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.qwen2 import parse_qwen2
from mlxd_models.families.sighted.windowed import (
    WindowedConfig,
    parse_windowed,
    windowed_tensors,
)
from mlxd_models.files.nested_text import TEXT_CONFIG, text_config, text_name
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_models.sizes.weight_forms import TOWER_PREFIX
from mlxd_shared import config as bounds

ARCHITECTURE: Final = "Qwen2_5_VLForConditionalGeneration"
VISION_CONFIG: Final = "vision_config"
_STORED_TOWERS: Final = ("visual.", TOWER_PREFIX)
"""What the names of a tower's tensors begin with, as checkpoints have them."""
_PLACEHOLDER: Final = "image_token_id"
_TOKEN_DEFAULT: Final = 151_655
_TIED: Final = "tie_word_embeddings"
_ROPE_KEYS: Final = ("rope_scaling", "rope_parameters")
_KIND_KEYS: Final = ("type", "rope_type")
_SECTIONS: Final = "mrope_section"
_SECTIONS_DEFAULT: Final = (16, 24, 24)


@dataclass(frozen=True, slots=True)
class Qwen25VlConfig:
    """The shape of a Qwen2.5-VL."""

    text: DecoderConfig
    tower: WindowedConfig
    token_id: int

    def within(self, context: int) -> Qwen25VlConfig:
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, text=self.text.within(context))


def parse_qwen2_5_vl(config: Mapping[str, Any]) -> Qwen25VlConfig:
    """Return the config of a `Qwen2_5_VLForConditionalGeneration`."""
    fields = Fields(config)
    if not fields.has(VISION_CONFIG):
        raise fields.error(VISION_CONFIG, "missing")
    text = _parse_text(fields)
    tower = parse_windowed(fields.part(VISION_CONFIG))
    if tower.output != text.hidden:
        problem = f"{tower.output} is not the text's hidden_size of {text.hidden}"
        raise fields.error(f"{VISION_CONFIG}.out_hidden_size", problem)
    token_id = fields.integer(_PLACEHOLDER, low=0, high=VOCAB_MAX, default=_TOKEN_DEFAULT)
    if token_id >= text.vocab:
        raise fields.error(_PLACEHOLDER, f"{token_id} is beyond the vocabulary of {text.vocab}")
    return Qwen25VlConfig(text, tower, token_id)


def _parse_text(fields: Fields) -> DecoderConfig:
    values = dict(fields.values)
    if not fields.has(TEXT_CONFIG):
        values[TEXT_CONFIG] = {
            key: value for key, value in values.items() if key not in (VISION_CONFIG, TEXT_CONFIG)
        }
    nested = text_config(ARCHITECTURE, values)
    if nested is None:
        raise fields.error(TEXT_CONFIG, "not an object")
    ties = [part.get(_TIED) for part in (values, values[TEXT_CONFIG])]
    own = {**nested, _TIED: True} if True in ties else dict(nested)
    stated = [key for key in _ROPE_KEYS if isinstance(own.get(key), Mapping)]
    sections = {key: _sections(Fields(own[key], f"{key}.")) for key in stated}
    if len(set(sections.values())) > 1:
        raise fields.error(_ROPE_KEYS[0], f"contradicts {_ROPE_KEYS[1]}")
    own |= {key: _without_axes(own[key]) for key in stated}
    text = parse_qwen2(own)
    chosen = next(iter(sections.values()), _SECTIONS_DEFAULT)
    if 2 * sum(chosen) != text.head_dim:
        problem = f"{list(chosen)} are not the {text.head_dim // 2} pairs of a head"
        raise fields.error(f"{(stated or _ROPE_KEYS)[0]}.{_SECTIONS}", problem)
    return replace(text, rope=replace(text.rope, sections=chosen))


def _sections(rope: Fields) -> tuple[int, int, int]:
    """Return how many pairs turn by each axis."""
    rope.demand("mrope_interleaved", only=False)
    stated = rope.values.get(_SECTIONS, _SECTIONS_DEFAULT)
    if (
        not isinstance(stated, list | tuple)
        or len(stated) != len(_SECTIONS_DEFAULT)
        or any(type(count) is not int or count < 1 for count in stated)
    ):
        raise rope.error(_SECTIONS, f"{stated!r} is not a number of pairs for each of three axes")
    time, height, width = stated
    return time, height, width


def _without_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary part as of a text with one axis: "mrope" alone scales nothing."""
    plain = {key: value for key, value in rope.items() if key != _SECTIONS}
    kinds = {key: "default" for key in _KIND_KEYS if plain.get(key) == "mrope"}
    return {**plain, **kinds}


def qwen2_5_vl_tensors(config: Qwen25VlConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    return (*llama_tensors(config.text), *windowed_tensors(config.tower))


def qwen2_5_vl_footprint(config: Qwen25VlConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    sight = SightSizes(
        token_id=config.token_id,
        tokens=bounds.IMAGE_PLACES_MAX,
        side=config.tower.side,
        hidden=config.text.hidden,
        pass_values=config.tower.pass_values,
        settled_values=config.tower.settled_values,
        varies=True,
    )
    return replace(llama_footprint(config.text), sight=sight)


def qwen2_5_vl_name(name: str) -> str | None:
    """Return how `qwen2_5_vl_tensors` calls a stored tensor; None for one that is left unread."""
    own = name.removeprefix("model.")
    for before in _STORED_TOWERS:
        if own.startswith(before):
            inner = own.removeprefix(before)
            return None if inner == "rotary_pos_emb.inv_freq" else TOWER_PREFIX + inner
    return text_name(name)


QWEN2_5_VL: Final = Family(
    "mlxd_worker.models.families.qwen2_5_vl",
    parse_qwen2_5_vl,
    qwen2_5_vl_tensors,
    qwen2_5_vl_footprint,
    "qwen2_5_vl",
    qwen2_5_vl_name,
)
