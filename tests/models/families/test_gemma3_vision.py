"""config.json of a Gemma 3 that sees: tower, averages and tokens, each taken or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxd_models.describe import describe
from mlxd_models.families.sighted.gemma3 import (
    SEEING_GEMMA3,
    parse_seeing_gemma3,
    seeing_gemma3_name,
)
from mlxd_models.families.sighted.tower import SCORES_MAX, TowerActivation
from mlxd_shared.config import IMAGE_WHOLE_TOKENS_MAX
from mlxd_shared.domain.errors import InvalidModel
from tests.support.gemma3_cases import (
    BEHIND,
    PLACE,
    panning_settings,
    seeing_gemma3_config,
)
from tests.support.random_model import write_random_model
from tests.support.tiny_model import write_json

PUBLISHED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
"""As the model of 4 billion values says it."""


def test_a_published_config_is_understood() -> None:
    """4,096 patches become 256 places, squares of four to a side; scores are never all there."""
    parsed = parse_seeing_gemma3(PUBLISHED)
    tower = parsed.tower
    assert (tower.layers, tower.rows, tower.ends_normed) == (27, 4096, True)
    assert (tower.activation, tower.norm_eps) == (TowerActivation.GELU_TANH, 1e-6)
    assert (parsed.tokens, parsed.pooled, parsed.token_id) == (256, 4, 262_144)
    sight = SEEING_GEMMA3.footprint(parsed).sight
    assert sight is not None
    assert (sight.tokens, sight.side, sight.hidden, sight.whole) == (256, 896, 2560, True)
    assert sight.around == (255_999, 262_144, 256_000)
    assert sight.pass_values < 16 * 4096 * 4096
    assert 4 * sight.pass_values > 3 * SCORES_MAX
    left_out = {key: value for key, value in PUBLISHED.items() if "token" not in key}
    assert parse_seeing_gemma3(left_out) == parsed


def test_names_of_both_ages_are_known() -> None:
    """As transformers wrote them before and since; a pooling head is left unread."""
    for before in ("vision_tower.vision_model.", "model.vision_tower."):
        for stem in ("encoder.layers.0.layer_norm1.weight", "post_layernorm.bias"):
            assert seeing_gemma3_name(before + stem) == f"vision_tower.{stem}"
        assert seeing_gemma3_name(f"{before}head.probe") is None
    for before in ("", "model."):
        name = "multi_modal_projector.mm_soft_emb_norm.weight"
        assert seeing_gemma3_name(before + name) == name
    for before in ("language_model.model.", "model.language_model."):
        assert seeing_gemma3_name(f"{before}norm.weight") == "model.norm.weight"


def test_a_checkpoint_without_a_tower_is_the_text_alone(tmp_path: Path) -> None:
    """As mlx-lm converts them, whatever its config says of a tower; with a part of one it is not
    whole, and refused by what is missing."""
    folder = write_random_model(tmp_path / "whole", seeing_gemma3_config())
    write_json(folder / "preprocessor_config.json", panning_settings(32))
    assert describe(folder).footprint.sight is not None
    text = {**seeing_gemma3_config()["text_config"], "architectures": ["Gemma3ForCausalLM"]}
    folder = write_random_model(tmp_path / "text", text)
    for vision in ({"model_type": "gemma3_vision"}, None):
        config = seeing_gemma3_config() | {"vision_config": vision}
        write_json(folder / "config.json", config)
        assert describe(folder).footprint.sight is None
    assert describe(folder).architecture == "Gemma3ForConditionalGeneration"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text_config": None}, "text_config"),
    "no tower": ({"vision_config": None}, "vision_config"),
    "another tower": ({"vision_config": {"model_type": "clip_vision_model"}},
                      "vision_config.model_type"),
    "no square": ({"mm_tokens_per_image": 15}, "mm_tokens_per_image"),
    "more than patches": ({"mm_tokens_per_image": 81}, "mm_tokens_per_image"),
    "another number": ({"mm_tokens_per_image": 25}, "mm_tokens_per_image"),
    "more than a pass": ({"mm_tokens_per_image": IMAGE_WHOLE_TOKENS_MAX + 1},
                         "mm_tokens_per_image"),
    "no such token": ({"image_token_index": 320}, "image_token_index"),
    "no such begin": ({"boi_token_index": 320}, "boi_token_index"),
    "two ends": ({"eoi_token_id": BEHIND + 1}, "eoi_token_id"),
    "one token for two": ({"boi_token_index": PLACE}, "image_token_index"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """A key that asks for what the model does not do, or contradicts another, is named."""
    changes, field = REFUSED[name]
    with pytest.raises(InvalidModel) as caught:
        parse_seeing_gemma3({**seeing_gemma3_config(), **changes})
    assert caught.value.field == field
