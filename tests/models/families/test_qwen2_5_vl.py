"""config.json of a Qwen2.5-VL: text, tower and axes, each key taken or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxd_models.families.sighted.qwen2_5_vl import QWEN2_5_VL, parse_qwen2_5_vl
from mlxd_models.families.sighted.qwen_parts import qwen_name
from mlxd_models.fit.plan import ACTIVATIONS_TERM
from mlxd_models.fit.planner import plan_load
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import LoadSpec
from tests.support.model_facts import device, facts
from tests.support.seeing_shapes import shaped_config

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_act": "silu", "hidden_size": 2048, "image_token_id": 151655,
    "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "model_type": "qwen2_5_vl", "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
        "hidden_size": 1280, "in_chans": 3, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2,
        "window_size": 112,
    },
    "vocab_size": 151936,
}  # fmt: skip
"""As the model of 3 billion values says it, flat."""


def nested_config() -> dict[str, Any]:
    """Return the same as newer files have it."""
    kept = ("architectures", "image_token_id", "model_type", "vision_config")
    text = {key: value for key, value in PUBLISHED.items() if key not in kept}
    theta = text.pop("rope_theta")
    text["rope_parameters"] = {
        "mrope_section": text.pop("rope_scaling")["mrope_section"],
        "rope_theta": theta,
        "rope_type": "default",
        "type": "default",
    }
    return {**{key: PUBLISHED[key] for key in kept}, "text_config": text}


def test_a_published_config_is_read_flat_and_nested() -> None:
    """Both ages of files say the same; what is left out is transformers' own."""
    parsed = parse_qwen2_5_vl(PUBLISHED)
    text, tower = parsed.text, parsed.tower
    assert (text.hidden, text.layers, text.head_dim, text.rope.base) == (2048, 36, 128, 1e6)
    assert (text.tied_head, text.qkv_bias, text.output_bias) == (True, True, False)
    assert text.rope.sections == (16, 24, 24)
    assert (tower.side, tower.window, tower.full) == (28, 4, frozenset({7, 15, 23, 31}))
    assert (tower.layers, tower.mlp, tower.frames, parsed.token_id) == (32, 3420, 2, 151655)
    assert parse_qwen2_5_vl(nested_config()) == parsed
    sight = QWEN2_5_VL.footprint(parsed).sight
    assert sight is not None
    assert (sight.varies, sight.side, sight.tokens) == (True, 28, config.IMAGE_PLACES_MAX)
    assert sight.pixels_nbytes == 3 * 28 * 28 * config.IMAGE_PLACES_MAX
    least = {"hidden_size": 1280, "out_hidden_size": 2048}
    assert parse_qwen2_5_vl({**PUBLISHED, "vision_config": least}).tower == tower


def test_it_has_as_many_values_as_published() -> None:
    """3,754,622,976 weights, of which the tower has 668,684,288."""
    specs = [spec for spec in QWEN2_5_VL.tensors(parse_qwen2_5_vl(PUBLISHED)) if spec.required]
    assert sum(spec.values for spec in specs) == 3_754_622_976
    seen = [spec for spec in specs if spec.name.startswith("vision_tower.")]
    assert sum(spec.values for spec in seen) == 668_684_288
    assert len({spec.name for spec in specs}) == len(specs)


def test_names_of_all_ages_are_known() -> None:
    """As published, as transformers writes them since, and as MLX's converters do."""
    for before in ("visual.", "model.visual.", "vision_tower."):
        assert qwen_name(f"{before}blocks.0.norm1.weight") == "vision_tower.blocks.0.norm1.weight"
        assert qwen_name(f"{before}rotary_pos_emb.inv_freq") is None
    for before in ("model.", "model.language_model.", "language_model.model."):
        assert qwen_name(f"{before}norm.weight") == "model.norm.weight"
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert qwen_name(name) == "lm_head.weight"


def rope(**changes: Any) -> dict[str, Any]:
    """Return a change of the rotary part."""
    return {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1], **changes}}


def vision(**changes: Any) -> dict[str, Any]:
    """Return a change of the tower."""
    return {"vision_config": {**shaped_config()["vision_config"], **changes}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tower": ({"vision_config": None}, "vision_config"),
    "no text": ({"text_config": "none"}, "text_config"),
    "two axes": (rope(mrope_section=[2, 2]), "rope_scaling.mrope_section"),
    "other pairs": (rope(mrope_section=[2, 2, 1]), "rope_scaling.mrope_section"),
    "no pairs": (rope(mrope_section=[3, 1, 0]), "rope_scaling.mrope_section"),
    "interleaved": (rope(mrope_interleaved=True), "rope_scaling.mrope_interleaved"),
    "another kind": (rope(type="swirl"), "rope_scaling.type"),
    "two sections": (
        {**rope(), "rope_parameters": rope(mrope_section=[1, 2, 1])["rope_scaling"]},
        "rope_scaling",
    ),
    "another width": (vision(out_hidden_size=16), "vision_config.out_hidden_size"),
    "grey": (vision(in_chans=1), "vision_config.in_chans"),
    "another activation": (vision(hidden_act="gelu"), "vision_config.hidden_act"),
    "odd heads": (vision(num_heads=3), "vision_config.num_heads"),
    "no window": (vision(window_size=7), "vision_config.window_size"),
    "no such layer": (vision(fullatt_block_indexes=[3]), "vision_config.fullatt_block_indexes"),
    "no layers": (vision(fullatt_block_indexes=1), "vision_config.fullatt_block_indexes"),
    "another rope": (
        vision(rope_parameters={"rope_type": "linear"}), "vision_config.rope_parameters.rope_type",
    ),
    "no such token": ({"image_token_id": 400}, "image_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """A key that asks for what the model does not do, or contradicts another, is named."""
    changes, field = REFUSED[name]
    with pytest.raises(InvalidModel) as caught:
        parse_qwen2_5_vl({**shaped_config(), **changes})
    assert caught.value.field == field


def test_the_largest_image_is_a_part_of_the_plan() -> None:
    """One image in a pass, a layer at a time on a CPU; as many features as are kept."""
    sight = QWEN2_5_VL.footprint(parse_qwen2_5_vl(PUBLISHED)).sight
    assert sight is not None
    blind = facts(100)
    spec, where = LoadSpec(512, 2, prefix_cache_nbytes=0), device(1 << 16)
    plans = [plan_load(each, spec, where) for each in (blind, replace(blind, sight=sight))]
    before, behind = (plan.nbytes_of(ACTIVATIONS_TERM) for plan in plans)
    assert plans[0].weights is plans[1].weights
    kept = config.IMAGE_FEATURES_KEPT_MAX * config.IMAGE_PLACES_MAX * 2048
    seen = sight.settled_values
    assert behind in {max(before, seen * size) + kept * size for size in (2, 4)}
    assert 0 < seen < sight.pass_values
    # 16,384 patches: their feed-forward is the widest, and scores are bounded beside it.
    assert sight.pass_values >= 16_384 * (2 * 1280 + 4 * 3420)
    assert sight.pass_values < 16 * 16_384**2
