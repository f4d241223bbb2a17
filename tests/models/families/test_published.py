"""Descriptions beside what their publishers say: how many values the weights of a model have."""

from __future__ import annotations

import json
import math

import pytest

from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from tests.real_inputs import real_input

PUBLISHED = {
    "HuggingFaceTB--SmolLM2-135M-Instruct": (134_515_008, 23_040),
    "Qwen--Qwen3-0.6B": (596_049_920, 114_688),
    "Qwen--Qwen3-8B": (8_190_735_360, 147_456),
    "Qwen--Qwen3-32B-FP8": (32_762_123_264, 262_144),
    "Qwen--Qwen3-30B-A3B": (30_532_122_624, 98_304),
    "Qwen--Qwen3-235B-A22B": (235_093_634_560, 192_512),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480_154_875_392, 253_952),
    "Qwen--Qwen3-VL-2B-Instruct": (2_127_532_032, 114_688),
    "deepseek-ai--DeepSeek-V3": (671_026_419_200, 70_272),
    "meta-llama--Meta-Llama-3.1-8B": (8_030_261_248, 131_072),
    "meta-llama--Meta-Llama-3.1-70B": (70_553_706_496, 327_680),
    "moonshotai--Kimi-K2-Instruct": (1_026_408_232_448, 70_272),
    "openai--gpt-oss-20b": (20_914_757_184, 24_576),
    "openai--gpt-oss-120b": (116_829_156_672, 36_864),
}
"""Parameters as published, and bytes of a token's keys and values in bfloat16, by arithmetic."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_real_config_describes_as_many_parameters_as_published(name: str) -> None:
    """What must be stored adds up to the published count, which nobody here has reckoned."""
    config = json.loads(real_input("configs", "hf", name, "config.json").read_text())
    parameters, token_nbytes = PUBLISHED[name]
    family = find_family(REGISTRY, architecture_of(config))
    parsed = family.parse(config)

    specs = family.tensors(parsed)
    caches = family.footprint(parsed).caches

    assert sum(math.prod(spec.shape) for spec in specs if spec.required) == parameters
    assert 2 * caches.kv_values_per_token == token_nbytes


def test_every_tensor_of_a_description_has_a_name_of_its_own() -> None:
    """Two tensors under one name would be one tensor that is checked twice."""
    for name in PUBLISHED:
        config = json.loads(real_input("configs", "hf", name, "config.json").read_text())
        family = find_family(REGISTRY, architecture_of(config))
        names = [spec.name for spec in family.tensors(family.parse(config))]

        assert len(set(names)) == len(names)
