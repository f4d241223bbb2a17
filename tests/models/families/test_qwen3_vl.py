"""config.json of Qwen3-VLs and of Qwen3.5s that see: each key taken or refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from mlxd_models.families.common.rope import RopeConfig
from mlxd_models.families.registry import REGISTRY
from mlxd_models.families.sighted.qwen3_5_vl import QWEN3_5_MOE_VL, QWEN3_5_VL
from mlxd_models.families.sighted.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from mlxd_models.fit.plan import ACTIVATIONS_TERM
from mlxd_models.fit.planner import plan_load
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import LoadSpec
from tests.real_inputs import real_input
from tests.support.model_facts import device, facts
from tests.support.qwen3_vl_cases import DENSE, HYBRID, HYBRID_SPARSE, SPARSE, stacked_config


def read_published(name: str = "Qwen3-VL-2B-Instruct") -> dict[str, Any]:
    """Return a config.json as published."""
    path = real_input("configs", "hf", f"Qwen--{name}", "config.json")
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def enlarge(architecture: str = DENSE, *, tower: dict[str, Any], **text: Any) -> dict[str, Any]:
    """Return the config of a larger one, by what its own says otherwise."""
    values = read_published()
    tied = {"tie_word_embeddings": text.get("tie_word_embeddings", True)}
    own = {"text_config": {**values["text_config"], **text}}
    tower = {"vision_config": {**values["vision_config"], **tower}}
    return {**values, **tied, **own, **tower, "architectures": [architecture]}


LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
         "deepstack_visual_indexes": [8, 16, 24]}  # fmt: skip
COUNTS: dict[str, tuple[dict[str, Any], int]] = {
    "4B": (
        enlarge(
            tower={"out_hidden_size": 2560}, hidden_size=2560, intermediate_size=9728,
            num_hidden_layers=36, num_attention_heads=32,
        ),
        4_437_815_808,
    ),
    "8B": (
        enlarge(
            tower={**LARGE, "out_hidden_size": 4096}, hidden_size=4096, intermediate_size=12_288,
            num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=False,
        ),
        8_767_123_696,
    ),
    "30B-A3B": (
        enlarge(
            SPARSE, tower={**LARGE, "out_hidden_size": 2048}, hidden_size=2048,
            num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=768, tie_word_embeddings=False,
        ),
        31_070_754_032,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_they_have_as_many_values_as_published(name: str) -> None:
    """Text and tower together, deep levels' mergers included."""
    values, count = COUNTS[name]
    family = REGISTRY[values["architectures"][0]]
    specs = [spec for spec in family.tensors(family.parse(values)) if spec.required]
    assert sum(math.prod(spec.shape) for spec in specs) == count


def test_a_published_config_is_read() -> None:
    """What is left out is transformers' own."""
    parsed = QWEN3_VL.parse(read_published())
    text, tower = parsed.text, parsed.tower
    assert (text.head_dim, text.rope.base, text.tied_head, text.head_norms) == (
        128, 5e6, True, True,
    )  # fmt: skip
    assert (text.rope.sections, text.rope.mixed) == ((24, 20, 20), True)
    assert (tower.side, tower.table, tower.deep, parsed.token_id) == (32, 48, (5, 11, 17), 151_655)
    sight = QWEN3_VL.footprint(parsed).sight
    assert sight is not None
    assert (sight.varies, sight.levels, sight.tokens) == (True, 3, config.IMAGE_PLACES_MAX)
    bare = {"architectures": [DENSE], "text_config": {}, "vision_config": {"out_hidden_size": 4096}}
    least = QWEN3_VL.parse(bare)
    assert (least.text.rope.base, least.tower.layers, least.tower.levels) == (5e5, 27, 3)
    hybrid = QWEN3_5_VL.parse(read_published("Qwen3.5-27B"))
    assert hybrid.text.decoder.rope.sections == (11, 11, 10)
    assert (hybrid.tower.levels, hybrid.token_id) == (0, 248_056)
    sparse = QWEN3_5_MOE_VL.parse(read_published("Qwen3.5-35B-A3B"))
    assert sparse.text.decoder.experts is not None


def test_axes_take_turns() -> None:
    """Height and width have a pair each of three as long as they have any; the rest are time's."""
    rope = RopeConfig(base=1e4, sections=(24, 20, 20), mixed=True)
    assert rope.axes == (0, 1, 2) * 20 + (0,) * 4
    assert replace(rope, mixed=False).axes == (0,) * 24 + (1,) * 20 + (2,) * 20
    assert replace(rope, sections=(11, 11, 10)).axes == (0, 1, 2) * 10 + (0, 1)


def rope(**changes: Any) -> dict[str, Any]:
    """Return a change of the rotary part."""
    stated = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    return {"rope_parameters": {**stated, **changes}}


TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "other pairs": (rope(mrope_section=[4, 2, 1]), "rope_parameters.mrope_section"),
    "no room": (rope(mrope_section=[1, 1, 6]), "rope_parameters.mrope_section"),
    "two axes": (rope(mrope_section=[4, 4]), "rope_parameters.mrope_section"),
    "apart": (rope(mrope_interleaved=False), "rope_parameters.mrope_interleaved"),
    "another kind": (rope(rope_type="swirl"), "rope_parameters.rope_type"),
    "biased": ({"attention_bias": True}, "attention_bias"),
}
TOWERS: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"out_hidden_size": 16}, "out_hidden_size"),
    "grey": ({"in_channels": 1}, "in_channels"),
    "another activation": ({"hidden_act": "silu"}, "hidden_act"),
    "odd heads": ({"num_heads": 3}, "num_heads"),
    "no square": ({"num_position_embeddings": 15}, "num_position_embeddings"),
    "no such layer": ({"deepstack_visual_indexes": [0, 3]}, "deepstack_visual_indexes"),
    "no order": ({"deepstack_visual_indexes": [2, 0]}, "deepstack_visual_indexes"),
    "twice": ({"deepstack_visual_indexes": [2, 2]}, "deepstack_visual_indexes"),
    "no layers": ({"deepstack_visual_indexes": 1}, "deepstack_visual_indexes"),
    "too many": ({"depth": 6, "deepstack_visual_indexes": [0, 1, 2, 3, 4]},
                 "deepstack_visual_indexes"),
    "another rope": ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type"),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no tower": (DENSE, {"vision_config": None}, "vision_config"),
    "no text": (DENSE, {"text_config": None}, "text_config"),
    "no such token": (DENSE, {"image_token_id": 400}, "image_token_id"),
    "no tower beside a hybrid": (HYBRID, {"vision_config": None}, "vision_config"),
}
REFUSED = {
    **{name: (DENSE, stacked_config(**text), field) for name, (text, field) in TEXTS.items()},
    **{
        name: (DENSE, stacked_config(vision=tower), f"vision_config.{field}")
        for name, (tower, field) in TOWERS.items()
    },
    **{
        name: (architecture, {**stacked_config(architecture), **outer}, field)
        for name, (architecture, outer, field) in OTHERS.items()
    },
    "deep hybrid": (
        HYBRID, stacked_config(HYBRID, vision={"deepstack_visual_indexes": [0]}),
        "vision_config.deepstack_visual_indexes",
    ),
    "unnormed": (SPARSE, stacked_config(SPARSE, norm_topk_prob=False), "norm_topk_prob"),
    "dense experts": (
        HYBRID_SPARSE, stacked_config(HYBRID_SPARSE, mlp_only_layers=[0]), "mlp_only_layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """A key that asks for what the model does not do, or contradicts another, is named."""
    architecture, values, field = REFUSED[name]
    with pytest.raises(InvalidModel) as caught:
        REGISTRY[architecture].parse(values)
    assert caught.value.field == field


def test_the_largest_image_is_a_part_of_the_plan() -> None:
    """One image in a pass, as many features as are kept, all of the most places and all levels."""
    sight = QWEN3_VL.footprint(QWEN3_VL.parse(read_published())).sight
    assert sight is not None
    blind = facts(100)
    spec, where = LoadSpec(512, 2, prefix_cache_nbytes=0), device(1 << 16)
    plans = [plan_load(each, spec, where) for each in (blind, replace(blind, sight=sight))]
    before, behind = (plan.nbytes_of(ACTIVATIONS_TERM) for plan in plans)
    kept = config.IMAGE_FEATURES_KEPT_MAX * config.IMAGE_PLACES_MAX * 4 * 2048
    seen = sight.settled_values
    assert behind in {max(before, seen * size) + kept * size for size in (2, 4)}
    assert 0 < seen < sight.pass_values


def test_types_leave_nothing_to_mlx_lm() -> None:
    """Each has the type that its files name, so that no other of the type is read as if it were."""
    types = [family.model_type for family in (QWEN3_VL, QWEN3_VL_MOE, QWEN3_5_VL, QWEN3_5_MOE_VL)]
    assert types == ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
    assert all(REGISTRY[name].blind is not None for name in (DENSE, SPARSE, HYBRID, HYBRID_SPARSE))
