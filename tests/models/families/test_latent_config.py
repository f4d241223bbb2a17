"""config.json of models that keep latents: every key is taken, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxd_models.families.common.experts import GroupsConfig, Scoring
from mlxd_models.families.latent.deepseek_v2 import parse_deepseek_v2
from mlxd_models.families.latent.deepseek_v3 import parse_deepseek_v3
from mlxd_models.families.latent.glm4_moe_lite import parse_glm4_moe_lite
from mlxd_models.families.latent.tensors import latent_tensors
from mlxd_shared.domain.errors import InvalidModel
from tests.worker.latent import DEEPSEEK_V2, DEEPSEEK_V3, GLM4, YARN

FAMILIES = {
    "v2": (parse_deepseek_v2, DEEPSEEK_V2),
    "v3": (parse_deepseek_v3, DEEPSEEK_V3),
    "glm": (parse_glm4_moe_lite, GLM4),
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no latents": ("v3", {"kv_lora_rank": None}, "kv_lora_rank", "missing"),
    "an odd rotating part": ("v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim", "odd"),
    "no plain part": ("v3", {"qk_nope_head_dim": 0}, "qk_nope_head_dim", "not in 1.."),
    "values unsaid": ("v3", {"v_head_dim": None}, "v_head_dim", "missing"),
    "keys of fewer heads": ("v3", {"num_key_value_heads": 2}, "num_key_value_heads", "4 heads"),
    "biases without lean queries": (
        "v3", {"attention_bias": True, "q_lora_rank": None}, "attention_bias", "q_lora_rank",
    ),
    "biases within": ("v3", {"mlp_bias": True}, "mlp_bias", "true"),
    "groups unsaid": ("v3", {"n_group": None}, "n_group", "missing"),
    "scaling unsaid": ("v3", {"routed_scaling_factor": None}, "routed_scaling_factor", "missing"),
    "dense layers unsaid": (
        "v3", {"first_k_dense_replace": None}, "first_k_dense_replace", "missing",
    ),
    "groups that do not divide": ("v3", {"n_group": 3}, "n_group", "does not divide"),
    "groups of one": ("v3", {"n_group": 8, "topk_group": 4}, "n_group", "2 are needed"),
    "too small groups": (
        "v3", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group", "3 are chosen",
    ),
    "more groups kept than there are": ("v3", {"topk_group": 5}, "topk_group", "not in 1..4"),
    "another choice": ("v3", {"topk_method": "greedy"}, "topk_method", "'noaux_tc'"),
    "other scores": ("v3", {"scoring_func": "softmax"}, "scoring_func", "'sigmoid'"),
    "sparse every other layer": ("v3", {"moe_layer_freq": 2}, "moe_layer_freq", "only 1"),
    "no experts": ("v3", {"n_routed_experts": None}, "n_routed_experts", "missing"),
    "fp8 of another kind": (
        "v3", {"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config.fmt", "e4m3",
    ),
    "another rotation": (
        "v3", {"rope_scaling": {"type": "longrope", "factor": 4}}, "rope_scaling.type", "longrope",
    ),
    "a part of the part rotates": (
        "glm", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "only 1",
    ),
    "base unsaid": ("glm", {"rope_theta": None}, "rope_theta", "missing"),
    "layers contradict": (
        "glm",
        {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "dense", "sparse"]},
        "mlp_layer_types", "contradicts",
    ),
    "too few layers": ("glm", {"mlp_layer_types": ["dense"]}, "mlp_layer_types", "names 1"),
    "layers of another kind": (
        "glm", {"mlp_layer_types": ["dense", "moe", "moe"]}, "mlp_layer_types", "not a list of",
    ),
    "v2 normalised": ("v2", {"norm_topk_prob": True}, "norm_topk_prob", "true"),
    "v2 of sigmoids": ("v2", {"scoring_func": "sigmoid"}, "scoring_func", "only 'softmax'"),
    "v2 by another method": ("v2", {"topk_method": "noaux_tc"}, "topk_method", "'noaux_tc'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str) -> None:
    """A key that would change the arithmetic unheard is an error that names it."""
    family, changes, field, words = REFUSED[name]
    parse, base = FAMILIES[family]

    with pytest.raises(InvalidModel) as refused:
        parse({**base, **changes})

    assert refused.value.field == field
    assert words in refused.value.problem


def test_whether_queries_are_lean_must_be_said() -> None:
    """Readers differ in what `q_lora_rank` is where it is absent; null is none."""
    unsaid = {key: value for key, value in DEEPSEEK_V3.items() if key != "q_lora_rank"}

    with pytest.raises(InvalidModel) as refused:
        parse_deepseek_v3(unsaid)

    assert refused.value.field == "q_lora_rank"
    assert parse_deepseek_v3({**DEEPSEEK_V3, "q_lora_rank": None}).query_rank is None


def test_heads_of_keys_may_be_left_unsaid() -> None:
    """Each head has its own keys, so nothing else could be meant."""
    unsaid = {key: value for key, value in DEEPSEEK_V3.items() if key != "num_key_value_heads"}
    assert "num_key_value_heads" in DEEPSEEK_V3
    assert parse_deepseek_v3(unsaid) == parse_deepseek_v3(DEEPSEEK_V3)


def test_the_keys_are_taken() -> None:
    """Widths, layers, scores, groups and scaling are the config's; yarn's gain on all of a head is
    in the scale of the scores."""
    config = parse_deepseek_v3(DEEPSEEK_V3)
    experts = config.decoder.experts
    gain = 1 + 0.5 * math.log(4) / 10

    assert experts is not None
    assert experts.layers == (False, True, True)
    assert experts.scoring is Scoring.SIGMOID
    assert experts.groups == GroupsConfig(count=4, kept=2, best=2)
    assert (experts.scaling, experts.corrected, experts.normalised) == (2.5, True, True)
    assert (config.entry_dim, config.query_dim, config.values) == (80, 48, 160)
    assert config.decoder.scale == pytest.approx(48**-0.5 * gain**2)
    newer = {**DEEPSEEK_V3, "rope_scaling": None, "rope_parameters": {**YARN, "rope_theta": 7.0}}
    assert parse_deepseek_v3(newer).decoder.scale == config.decoder.scale
    assert parse_deepseek_v3(newer).decoder.rope.base == 7.0


def test_a_family_has_its_own_defaults() -> None:
    """A GLM-4-MoE-lite's only dense layer is the first, and it scales by 1.8; a DeepSeek-V2 chooses
    by a softmax, from all experts."""
    unsaid = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace")
    glm = parse_glm4_moe_lite({k: v for k, v in GLM4.items() if k not in unsaid})
    named = parse_glm4_moe_lite(
        {**GLM4, "first_k_dense_replace": None, "mlp_layer_types": ["sparse", "dense", "sparse"]}
    )
    v2 = parse_deepseek_v2(
        {k: v for k, v in DEEPSEEK_V2.items() if k not in (*unsaid, "topk_method")}
    )

    assert glm.decoder.experts is not None
    assert named.decoder.experts is not None
    assert v2.decoder.experts is not None
    assert (glm.decoder.experts.layers, glm.decoder.experts.scaling) == ((False, True, True), 1.8)
    assert named.decoder.experts.layers == (True, False, True)
    assert (v2.decoder.experts.layers, v2.decoder.experts.scaling) == ((True, True, True), 1.0)
    assert v2.decoder.experts.scoring is Scoring.SOFTMAX
    assert (glm.decoder.experts.groups, v2.decoder.experts.groups) == (None, None)


def test_drafting_layers_are_known_by_name() -> None:
    """A layer after the last one may be stored whole, with what drafting needs; none of it must."""
    config = parse_deepseek_v3({**DEEPSEEK_V3, "num_nextn_predict_layers": 1})
    prefix = "model.layers.3."
    drafting = {s.name: s for s in latent_tensors(config) if s.name.startswith(prefix)}

    assert not any(spec.required for spec in drafting.values())
    for name in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head", "mlp.gate"):
        assert f"{prefix}{name}.weight" in drafting
    assert drafting[f"{prefix}self_attn.kv_b_proj.weight"].instead
    none = parse_deepseek_v3({**DEEPSEEK_V3, "num_nextn_predict_layers": 0})
    assert not any(spec.name.startswith(prefix) for spec in latent_tensors(none))
