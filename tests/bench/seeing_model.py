"""The random model of `seeing`, and its pictures, made in a process of their own.

`python -m tests.bench.seeing_model FOLDER SHAPE COUNT SIDE`: COUNT JPEGs of SIDE pixels a side.
Weights repeat every million values, so that 16 GB are written as fast as the disk takes them. The
tokenizer is the tests' tiny one, however many tokens the model has: prompts are made of its ids.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.support.made_weights import write_weights
from tests.support.seeing import add_place, encode_image, picture
from tests.support.seeing_shapes import write_shaped_settings

ARCHITECTURE: Final = "Qwen2_5_VLForConditionalGeneration"
TOKENS_MAX = 320
"""Of the tokenizer: prompts of text are drawn among these."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's config, and how it is stored."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    stored: str
    context: int


_COMMON: Final = {
    "architectures": [ARCHITECTURE],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
_TOWER: Final = {
    "hidden_act": "silu", "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 112,
}  # fmt: skip
SHAPES: Final[Mapping[str, Shape]] = {
    # The widths of Qwen2.5-VL-7B, whose text, tower and head have 8.3 thousand million values.
    "7b": Shape(
        {
            "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "bfloat16",
        4096,
    ),
    "tiny": Shape(
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        },
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 64, "fullatt_block_indexes": [1],
        },
        "float32",
        1024,
    ),
}  # fmt: skip


def config_of(shape: Shape) -> dict[str, Any]:
    """Return a model's config.json."""
    vision = {**_TOWER, **shape.vision}
    return {**_COMMON, **shape.text, "vision_config": vision, "image_token_id": 5}


def write_model(folder: Path, shape: Shape) -> None:
    """Write a model with tokenizer, template and the settings of its images."""
    write_weights(folder, config_of(shape), stored=shape.stored)
    add_place(folder)
    write_shaped_settings(folder, 28, min_pixels=56 * 56, max_pixels=28 * 28 * 16_384)


def picture_paths(folder: Path, count: int) -> list[Path]:
    """Return where so many pictures are."""
    return [folder / "pictures" / f"{number}.jpg" for number in range(count)]


def _write_picture(number: int, path: Path, *, side: int) -> None:
    image = picture(number, width=side, height=side)
    path.write_bytes(encode_image(image, "JPEG", quality=90))


def main() -> None:
    """Write the model that is named, unless it is there, and so many pictures of such a side."""
    folder, name, count, side = sys.argv[1:]
    if not (Path(folder) / "config.json").exists():
        write_model(Path(folder), SHAPES[name])
    paths = picture_paths(Path(folder), int(count))
    paths[0].parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_write_picture, side=int(side)), range(len(paths)), paths))


if __name__ == "__main__":
    main()
