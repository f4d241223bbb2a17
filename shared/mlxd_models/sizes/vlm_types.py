"""Which models mlx-vlm sees for, by config.json alone.

A name that is imported is one of `VLM_TYPES`: nothing else in a config leads to code. Types of
mlx-vlm that are not served, and why, are in `UNSERVED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

VLM_EXTRA: Final = "vlm"
"""What `pip install mlxd[...]` takes for it."""

VLM_VERSION: Final = "0.7.10"
"""The one version of mlx-vlm that the adapter was held to; its models change from one to another.
"""


@dataclass(frozen=True, slots=True)
class SeeingType:
    """What is known of a type besides its module, which has its name."""

    axes: bool
    """Whether tokens turn by three axes, as Qwen2-VL's do."""
    frames: int
    """How many pictures a patch has, one behind another, unless the config says."""
    in_rows: bool = False
    """Whether patches come row by row, [C, H, W] each; else place by place, with their frames."""


VLM_TYPES: Final[Mapping[str, SeeingType]] = MappingProxyType(
    {
        "dots_ocr": SeeingType(axes=False, frames=1),
        "glm4v": SeeingType(axes=True, frames=2),
        "glm4v_moe": SeeingType(axes=True, frames=2),
        "glm_ocr": SeeingType(axes=True, frames=2),
        "mage_vl": SeeingType(axes=False, frames=1),
        "paddleocr_vl": SeeingType(axes=True, frames=1, in_rows=True),
        "qwen2_vl": SeeingType(axes=True, frames=2),
    }
)
"""The types that are served, each of which keeps an image's shape and takes a place a square."""

_TILES = "sees an image as tiles, between tokens that its processor writes"
_BREAKS = "has tokens between an image's rows, which its processor writes"
_UNKNOWN = "makes images ready in a way of its own"

UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aya_vision": _TILES,
        "cohere2_vision": _TILES,
        "deepseek_vl_v2": _TILES,
        "ernie4_5_moe_vl": "chooses experts by which tokens are an image's",
        "fastvlm": "stands for images by an id that no tokenizer has",
        "gemma3n": "hears, and sees through a tower of convolutions",
        "granite_vision": _TILES,
        "hunyuan_vl": "turns tokens by four axes",
        "idefics2": _TILES,
        "idefics3": _TILES,
        "internvl": _TILES,
        "internvl_chat": _TILES,
        "jina_vlm": _TILES,
        "jvlm": _TILES,
        "kimi_vl": _UNKNOWN,
        "lfm2-vl": _TILES,
        "lfm2_vl": _TILES,
        "llava-qwen2": "stands for images by an id that no tokenizer has",
        "llava_next": _TILES,
        "llava_onevision": _TILES,
        "llava_qwen2": "stands for images by an id that no tokenizer has",
        "minicpmo": _TILES,
        "mistral3": _BREAKS,
        "mllama": "reads images beside the text, not within it",
        "molmo": _TILES,
        "paligemma": "reads a prompt in both directions, which no chunk and no prefix allows",
        "phi3_v": _TILES,
        "pixtral": _BREAKS,
        "qwen3_vl_moe": "adds an image's features in several layers",
        "smolvlm": _TILES,
        "zaya1_vl": "chooses weights by which tokens are an image's",
    }
)
"""What mlx-vlm sees for and mlxd does not, and what is in the way."""


def vlm_type(config: Mapping[str, Any]) -> str | None:
    """Return which of `VLM_TYPES` or `UNSERVED` a config is of; None where it is of neither.

    One that has no tower reads text alone, and is none of them.
    """
    stated = config.get("model_type")
    if not isinstance(stated, str) or not isinstance(config.get("vision_config"), Mapping):
        return None
    return stated if stated in VLM_TYPES or stated in UNSERVED else None
