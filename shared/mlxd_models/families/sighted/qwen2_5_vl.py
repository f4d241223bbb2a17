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

from mlxd_models.families.common.decoder import DecoderConfig, llama_tensors
from mlxd_models.families.common.family import Family, Footprint, llama_footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.qwen2 import parse_qwen2
from mlxd_models.families.sighted.qwen_parts import (
    VISION_CONFIG,
    check_output,
    nested_text,
    place_token,
    qwen_name,
    shaped_sight,
    take_sections,
    turn_by,
)
from mlxd_models.families.sighted.windowed import (
    WindowedConfig,
    parse_windowed,
    windowed_tensors,
)
from mlxd_models.files.nested_text import TEXT_CONFIG

ARCHITECTURE: Final = "Qwen2_5_VLForConditionalGeneration"
_TOKEN_DEFAULT: Final = 151_655
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
    check_output(fields, tower.output, text.hidden)
    token_id = place_token(fields, default=_TOKEN_DEFAULT, vocab=text.vocab)
    return Qwen25VlConfig(text, tower, token_id)


def _parse_text(fields: Fields) -> DecoderConfig:
    values = dict(fields.values)
    if not fields.has(TEXT_CONFIG):
        values[TEXT_CONFIG] = {
            key: value for key, value in values.items() if key not in (VISION_CONFIG, TEXT_CONFIG)
        }
    own = nested_text(ARCHITECTURE, Fields(values))
    plain, sections = take_sections(own, _SECTIONS_DEFAULT, mixed=False)
    text = parse_qwen2(plain)
    rope = turn_by(own, text.rope, sections, dims=text.head_dim, mixed=False)
    return replace(text, rope=rope)


def qwen2_5_vl_tensors(config: Qwen25VlConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    return (*llama_tensors(config.text), *windowed_tensors(config.tower))


def qwen2_5_vl_footprint(config: Qwen25VlConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    sight = shaped_sight(
        token_id=config.token_id,
        side=config.tower.side,
        hidden=config.text.hidden,
        pass_values=config.tower.pass_values,
        settled_values=config.tower.settled_values,
    )
    return replace(llama_footprint(config.text), sight=sight)


QWEN2_5_VL: Final = Family(
    "mlxd_worker.models.families.qwen2_5_vl",
    parse_qwen2_5_vl,
    qwen2_5_vl_tensors,
    qwen2_5_vl_footprint,
    "qwen2_5_vl",
    qwen_name,
)
