"""Qwen2.5-VL: a Qwen2 that reads what a windowed tower makes of images, each in its own shape.

Invariants:
- The text's config lies flat in config.json, as it was published, or under `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import VISION_CONFIG, tower_fields
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.qwen2 import QWEN2
from mlxd_models.families.sighted.qwen_parts import qwen_name
from mlxd_models.families.sighted.seeing_qwen import (
    NestedText,
    SeeingQwen,
    blind_of,
    put_together,
    with_sight,
)
from mlxd_models.families.sighted.windowed import (
    WindowedConfig,
    parse_windowed,
    windowed_tensors,
)
from mlxd_models.files.nested_text import TEXT_CONFIG
from mlxd_shared.config import IMAGE_PLACES_MAX

Qwen25VlConfig = SeeingQwen[DecoderConfig, WindowedConfig]

_TOKEN_DEFAULT: Final = 151_655
_TEXT: Final = NestedText(
    "Qwen2_5_VLForConditionalGeneration", QWEN2, sections=(16, 24, 24), mixed=False
)


def parse_qwen2_5_vl(config: Mapping[str, Any]) -> Qwen25VlConfig:
    """Return the config of a `Qwen2_5_VLForConditionalGeneration`."""
    fields = Fields(config)
    seen = tower_fields(fields)
    text = _TEXT.parse(_nest_text(fields))
    return put_together(fields, text, parse_windowed(seen), token_id=_TOKEN_DEFAULT)


def _parse_blind(config: Mapping[str, Any]) -> DecoderConfig:
    return _TEXT.parse_blind(_nest_text(Fields(config)).values)


def _nest_text(fields: Fields) -> Fields:
    """Return a config whose text is under a key of its own."""
    if fields.has(TEXT_CONFIG):
        return fields
    others = (VISION_CONFIG, TEXT_CONFIG)
    flat = {key: value for key, value in fields.values.items() if key not in others}
    return Fields({**fields.values, TEXT_CONFIG: flat})


def qwen2_5_vl_tensors(config: Qwen25VlConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    return (*QWEN2.tensors(config.text), *windowed_tensors(config.tower))


def qwen2_5_vl_footprint(config: Qwen25VlConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    settled = config.tower.settled_values_of(IMAGE_PLACES_MAX)
    return with_sight(QWEN2.footprint(config.text), config, settled_values=settled)


QWEN2_5_VL: Final = Family(
    "mlxd_worker.models.families.qwen_vl",
    parse_qwen2_5_vl,
    qwen2_5_vl_tensors,
    qwen2_5_vl_footprint,
    "qwen2_5_vl",
    qwen_name,
    blind=blind_of(QWEN2, _parse_blind),
)
