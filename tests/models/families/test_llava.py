"""config.json of a LLaVA: text, tower and what is between, each key taken or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxd_models.families.registry import REGISTRY
from mlxd_models.families.sighted.llava import LLAVA, llava_name, parse_llava
from mlxd_models.families.sighted.tower import TowerActivation
from mlxd_models.fit.plan import ACTIVATIONS_TERM
from mlxd_models.fit.planner import plan_load
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import LoadSpec
from tests.support.model_facts import device, facts
from tests.support.seeing import seeing_config

PUBLISHED = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
        "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
        "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24,
        "patch_size": 14, "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}  # fmt: skip
"""As LLaVA 1.5's says it, which leaves most sizes to transformers."""


def test_a_published_config_is_completed() -> None:
    """Sizes that are left out are transformers' own; an image takes 576 places."""
    parsed = parse_llava(PUBLISHED)
    text, tower = parsed.text, parsed.tower
    assert (text.hidden, text.layers, text.mlp, text.vocab) == (4096, 32, 11008, 32064)
    assert (tower.layers, tower.stored_layers, tower.rows, tower.patches) == (23, 24, 577, 576)
    assert (tower.activation, tower.norm_eps) == (TowerActivation.QUICK_GELU, 1e-5)
    assert (parsed.tokens, parsed.token_id, parsed.projector_bias) == (576, 32000, True)
    sight = LLAVA.footprint(parsed).sight
    assert sight is not None
    assert (sight.tokens, sight.side, sight.hidden) == (576, 336, 4096)


def test_names_of_both_ages_are_known() -> None:
    """As transformers wrote them before and since; what is never evaluated is left unread."""
    for before in ("vision_tower.vision_model.", "model.vision_tower.vision_model."):
        stem = "encoder.layers.0.layer_norm1.weight"
        assert llava_name(before + stem) == f"vision_tower.{stem}"
        assert llava_name(f"{before}post_layernorm.weight") is None
        assert llava_name(f"{before}embeddings.position_ids") is None
    for before in ("language_model.model.", "model.language_model."):
        assert llava_name(f"{before}norm.weight") == "model.norm.weight"
    for name in ("language_model.lm_head.weight", "lm_head.weight"):
        assert llava_name(name) == "lm_head.weight"
    for before in ("", "model."):
        name = "multi_modal_projector.linear_1.bias"
        assert llava_name(before + name) == name


def test_layers_behind_the_features_are_not_kept() -> None:
    """They are known by name and shape, and take no memory."""
    specs = LLAVA.tensors(parse_llava(seeing_config()))
    layers = {spec.name: spec.required for spec in specs if spec.name.endswith("fc1.weight")}
    assert list(layers.values()) == [True, True, False]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text_config": None}, "text_config"),
    "another text": ({"text_config": {"model_type": "gemma"}}, "text_config.model_type"),
    "no tower": ({"vision_config": None}, "vision_config"),
    "another tower": ({"vision_config": {"model_type": "dino"}}, "vision_config.model_type"),
    "several layers": ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
    "no such layer": ({"vision_feature_layer": -9}, "vision_config.num_hidden_layers"),
    "another strategy": (
        {"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy",
    ),
    "another activation": ({"projector_hidden_act": "silu"}, "projector_hidden_act"),
    "two tokens": ({"image_token_index": 6}, "image_token_index"),
    "no such token": ({"image_token_id": 400}, "image_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """A key that asks for what the model does not do, or contradicts another, is named."""
    changes, field = REFUSED[name]
    with pytest.raises(InvalidModel) as caught:
        parse_llava({**seeing_config(), **changes})
    assert caught.value.field == field


def test_seeing_is_a_part_of_the_plan() -> None:
    """Features that are kept, and a pass of the tower, are in the term of activations."""
    sight = REGISTRY["LlavaForConditionalGeneration"].footprint(parse_llava(PUBLISHED)).sight
    assert sight is not None
    blind = facts(100)
    spec, where = LoadSpec(512, 2, prefix_cache_nbytes=0), device(1 << 16)
    plans = [plan_load(each, spec, where) for each in (blind, replace(blind, sight=sight))]
    before, behind = (plan.nbytes_of(ACTIVATIONS_TERM) for plan in plans)
    assert plans[0].weights is plans[1].weights
    kept = config.IMAGE_FEATURES_KEPT_MAX * 576 * 4096
    seen = sight.settled_values  # one by one, and part by part, on a CPU
    many = config.IMAGES_TOGETHER_MAX * sight.pass_values
    assert sight.seeing_nbytes(2, on_cpu=False) == 2 * many
    assert behind in {max(before, seen * size) + kept * size for size in (2, 4)}
