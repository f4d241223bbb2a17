"""Tiny random models that see images in their own shape, whole folders for a worker.

A place has `SIDE` pixels to a side: two patches of four.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.random_model import TINY, decoder_config
from tests.support.seeing import write_placed_model
from tests.support.tiny_model import write_json

PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
PLACES_MAX = 24
"""Of an image, as the files of the tests' models say it."""
TOWER: Mapping[str, Any] = MappingProxyType(
    {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_heads": 2,
        "hidden_act": "silu",
        "in_chans": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 2 * SIDE,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 32,
    }
)


def shaped_config(
    *, token_id: int = 5, vision: Mapping[str, Any] | None = None, **text: Any
) -> dict[str, Any]:
    """Return the config.json of a tiny Qwen2.5-VL, its text flat beside the tower.

    vision, text: keys of the tower and of the text that are otherwise.
    """
    head_dim = TINY.hidden // TINY.heads
    own = {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [head_dim // 2 - 2, 1, 1]},
        **text,
    }
    flat = decoder_config("Qwen2_5_VLForConditionalGeneration", TINY, **own)
    del flat["bos_token_id"], flat["eos_token_id"]
    return {**flat, "vision_config": {**TOWER, **(vision or {})}, "image_token_id": token_id}


def shaped_settings(side: int = SIDE, *, merge: int = MERGE, **changes: Any) -> dict[str, Any]:
    """Return a preprocessor_config.json: images of 4 to `PLACES_MAX` places."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 4 * side * side,
        "max_pixels": PLACES_MAX * side * side,
        "patch_size": side // merge,
        "merge_size": merge,
        "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        **changes,
    }


def write_shaped_settings(
    folder: Path, side: int = SIDE, *, merge: int = MERGE, **changes: Any
) -> Path:
    """Write how images become multiples of `side` pixels; return `folder`."""
    settings = shaped_settings(side, merge=merge, **changes)
    write_json(folder / "preprocessor_config.json", settings)
    return folder


def write_shaped_model(folder: Path, *, seed: int = 1) -> Path:
    """Write a tiny Qwen2.5-VL with tokenizer, template and image settings; return `folder`."""
    write_placed_model(folder, shaped_config(), seed=seed)
    return write_shaped_settings(folder)


def places_of(width: int, height: int) -> int:
    """Return how many places an image of this size takes: near its own, within the limits.

    By arithmetic on places alone, for sizes of which neither rounding is near a half.
    """
    rows, columns = round(height / SIDE), round(width / SIDE)
    if rows * columns > PLACES_MAX:
        shrink = math.sqrt(width * height / (PLACES_MAX * SIDE * SIDE))
        rows, columns = int(height / shrink / SIDE), int(width / shrink / SIDE)
    return max(rows, 1) * max(columns, 1)
