"""Qwen3-VL: a Qwen3, dense or with experts, that reads what a stacked tower makes of images.

Invariants:
- What a tower's deep layers give is added to the places of an image behind the text's first layers,
  one level a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import VISION_CONFIG
from mlxd_models.families.qwen3 import QWEN3
from mlxd_models.families.qwen3_moe import parse_qwen3_moe
from mlxd_models.families.sighted.seeing_qwen import (
    NestedText,
    Stacked,
    parse_stacked_qwen,
    stacked_family,
)
from mlxd_models.families.sighted.stacked import DEEP

_BUILDER: Final = "mlxd_worker.models.families.qwen_vl"
_SECTIONS_DEFAULT: Final = (24, 20, 20)
_TOKEN_DEFAULT: Final = 151_655
_DEEP_DEFAULT: Final = (8, 16, 24)


def _parse_experts(config: Mapping[str, Any]) -> DecoderConfig:
    Fields(config).demand("norm_topk_prob", only=True)
    text = parse_qwen3_moe({**config, "norm_topk_prob": True})
    if text.experts is None:
        return text
    return replace(text, experts=replace(text.experts, fused=True, fused_by_input=True))


def _parse(config: Mapping[str, Any], text: NestedText[DecoderConfig]) -> Stacked[DecoderConfig]:
    parsed = parse_stacked_qwen(config, text, token_id=_TOKEN_DEFAULT, deep=_DEEP_DEFAULT)
    levels, layers = parsed.tower.levels, parsed.text.layers
    if levels > layers:
        problem = f"{levels} levels for {layers} layers of the text"
        raise Fields(config).error(f"{VISION_CONFIG}.{DEEP}", problem)
    return parsed


_DENSE: Final = NestedText("Qwen3VLForConditionalGeneration", QWEN3, _SECTIONS_DEFAULT)
_SPARSE: Final = NestedText(
    "Qwen3VLMoeForConditionalGeneration", llama_family(_parse_experts), _SECTIONS_DEFAULT
)
QWEN3_VL: Final = stacked_family(_BUILDER, "qwen3_vl", _DENSE, partial(_parse, text=_DENSE))
QWEN3_VL_MOE: Final = stacked_family(
    _BUILDER, "qwen3_vl_moe", _SPARSE, partial(_parse, text=_SPARSE)
)
