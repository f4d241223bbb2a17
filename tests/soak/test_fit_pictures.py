"""What a model that sees is said to need is what it takes while it looks at its largest pictures.

`python -m pytest -m soak tests/soak/test_fit_pictures.py -s` prints the table of docs/evidence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.models import Shape
from tests.support.fit_pictures import Seen, measure
from tests.support.gemma3_cases import add_marks, panning_settings, seeing_gemma3_config
from tests.support.qwen3_vl_cases import stacked_config
from tests.support.random_model import decoder_config
from tests.support.seeing import image_settings, seeing_config
from tests.support.seeing_shapes import shaped_config, shaped_settings
from tests.support.tiny_model import VOCAB

RATIO_MIN, RATIO_MAX = 0.9, 1.1
NARROW = Shape(hidden=64, layers=1, heads=2, kv_heads=1, mlp=128, context=8192)
"""Of a text that takes next to nothing, so that what is judged is what seeing takes."""


def make_shaped(hidden: int, heads: int, *, full: list[int], pictures: tuple[tuple[int, int], ...],
           places: int) -> Seen:  # fmt: skip
    """Return a Qwen2.5-VL of these widths, and the pictures that it is shown."""
    vision = {
        "depth": 2, "hidden_size": hidden, "num_heads": heads, "patch_size": 14,
        "intermediate_size": 171 * hidden // 64, "window_size": 112,
        "fullatt_block_indexes": full, "out_hidden_size": NARROW.hidden,
    }  # fmt: skip
    text = decoder_config("Qwen2_5_VLForConditionalGeneration", NARROW)
    config = shaped_config(vision=vision, **text)
    head_dim = NARROW.hidden // NARROW.heads
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [head_dim // 2 - 8, 4, 4]}
    config["model_type"] = "qwen2_5_vl"
    settings = shaped_settings(28, min_pixels=56 * 56, max_pixels=28 * 28 * 16_384)
    return Seen(f"qwen2.5-vl-{hidden}-{len(full)}", config, settings, pictures, places)


def make_square(tower: str, side: int) -> Seen:
    """Return a LLaVA of three layers, whose images have the published size, four at once."""
    config = seeing_config(tower=tower)
    config["vision_config"] |= {
        "image_size": side, "patch_size": 14, "hidden_size": 512, "intermediate_size": 2048,
        "num_attention_heads": 8,
    }  # fmt: skip
    more = decoder_config("LlamaForCausalLM", NARROW, model_type="llama")
    config["text_config"] |= more
    places = (side // 14) ** 2
    pictures = ((640, 480), (1600, 1200))
    return Seen(f"llava-{tower}-{side}", config, image_settings(side, tower=tower), pictures,
                places, rows=4)  # fmt: skip


def make_stacked() -> Seen:
    """Return a Qwen3-VL of three layers, one of which gives features of its own."""
    vision = {
        "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024, "patch_size": 16,
        "out_hidden_size": NARROW.hidden, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [1],
    }  # fmt: skip
    config = stacked_config(vision=vision)
    config["text_config"] |= {
        "hidden_size": NARROW.hidden, "num_hidden_layers": 2, "num_attention_heads": NARROW.heads,
        "num_key_value_heads": NARROW.kv_heads, "intermediate_size": NARROW.mlp,
        "max_position_embeddings": NARROW.context, "vocab_size": VOCAB,
    }  # fmt: skip
    settings = shaped_settings(
        32, min_pixels=64 * 64, max_pixels=32 * 32 * 16_384,
        image_processor_type="Qwen2VLImageProcessorFast",
    )  # fmt: skip
    return Seen("qwen3-vl-256", config, settings, ((2048, 2048),), places=4096)


def make_marked() -> Seen:
    """Return a Gemma 3 of two layers, whose images have the published size."""
    config = seeing_gemma3_config(
        text={"hidden_size": NARROW.hidden, "max_position_embeddings": NARROW.context},
        vision={
            "image_size": 896, "patch_size": 14, "hidden_size": 256, "intermediate_size": 1024,
            "num_attention_heads": 4,
        },
        mm_tokens_per_image=256,
    )  # fmt: skip
    pictures = ((640, 480), (1600, 1200))
    return Seen("gemma3-896", config, panning_settings(896), pictures, 256, place=add_marks)


LARGEST = 64 * 28
POINTS = [
    make_shaped(256, 4, full=[1], pictures=((LARGEST, LARGEST),), places=4096),
    make_shaped(384, 8, full=[], pictures=((896, 896), (2 * LARGEST, LARGEST // 2)), places=4096),
    make_square("clip", 336),
    make_square("siglip", 384),
    make_stacked(),
    make_marked(),
]


@pytest.mark.asyncio
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
async def test_an_estimate_holds_while_pictures_are_seen(point: Seen, tmp_path: Path) -> None:
    """Of MLX's memory, and of the worker's process and its decoders' together, within 10 %."""
    truth = await measure(point, tmp_path / "model")
    sys.stderr.write(f"\n{truth.row()}\n")
    assert RATIO_MIN <= truth.device_ratio <= RATIO_MAX
    assert RATIO_MIN <= truth.total_ratio <= RATIO_MAX
