"""Qwen3.5 with its tower: a hybrid text, dense or with experts, that reads what it makes of images.

Invariants:
- The tower gives its last layer alone.
- Only the part of a head that turns does so by three axes; recurrent layers know nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import VISION_CONFIG
from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_models.families.hybrid.qwen3_5 import QWEN3_5
from mlxd_models.families.hybrid.qwen3_5_moe import QWEN3_5_MOE
from mlxd_models.families.sighted.seeing_qwen import (
    NestedText,
    Stacked,
    parse_stacked_qwen,
    stacked_family,
)
from mlxd_models.families.sighted.stacked import DEEP

_BUILDER: Final = "mlxd_worker.models.families.qwen3_5_vl"
_SECTIONS_DEFAULT: Final = (11, 11, 10)
_TOKEN_DEFAULT: Final = 248_056


def _parse(config: Mapping[str, Any], text: NestedText[HybridConfig]) -> Stacked[HybridConfig]:
    parsed = parse_stacked_qwen(config, text, token_id=_TOKEN_DEFAULT)
    if parsed.tower.levels:
        problem = f"{list(parsed.tower.deep)} are not supported, only none"
        raise Fields(config).error(f"{VISION_CONFIG}.{DEEP}", problem)
    return parsed


_DENSE: Final = NestedText("Qwen3_5ForConditionalGeneration", QWEN3_5, _SECTIONS_DEFAULT)
_SPARSE: Final = NestedText("Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE, _SECTIONS_DEFAULT)
QWEN3_5_VL: Final = stacked_family(_BUILDER, "qwen3_5", _DENSE, partial(_parse, text=_DENSE))
QWEN3_5_MOE_VL: Final = stacked_family(
    _BUILDER, "qwen3_5_moe", _SPARSE, partial(_parse, text=_SPARSE)
)
