"""config.json of a decoder: each way in which it can be wrong is an error that names the key."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxd_models.families.common.rope import RopeConfig
from mlxd_models.families.llama import parse_llama
from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from mlxd_models.files.model_config import read_model_config
from mlxd_shared.domain.errors import InvalidModel
from tests.real_inputs import real_input
from tests.worker.tiny import config_with

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
BREACHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no hidden size": ({"hidden_size": None}, "hidden_size", "missing"),
    "size as text": ({"hidden_size": "32"}, "hidden_size", "not an integer"),
    "size as boolean": ({"hidden_size": True}, "hidden_size", "not an integer"),
    "size as fraction": ({"hidden_size": 32.0}, "hidden_size", "not an integer"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers", "not in 1.."),
    "too many layers": ({"num_hidden_layers": 1 << 30}, "num_hidden_layers", "not in 1.."),
    "no vocabulary": ({"vocab_size": None}, "vocab_size", "missing"),
    "no context": (
        {"max_position_embeddings": None}, "max_position_embeddings", "missing",
    ),
    "negative context": (
        {"max_position_embeddings": -1}, "max_position_embeddings", "not in 8..",
    ),
    "more key heads than heads": (
        {"num_key_value_heads": 8}, "num_key_value_heads", "not in 1..4",
    ),
    "heads not divided": (
        {"num_key_value_heads": 3}, "num_key_value_heads", "does not divide 4",
    ),
    "no head size": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "head_dim", "missing"),
    "odd head size": ({"head_dim": 7}, "head_dim", "odd"),
    "epsilon not finite": ({"rms_norm_eps": math.nan}, "rms_norm_eps", "not a finite number"),
    "epsilon zero": ({"rms_norm_eps": 0}, "rms_norm_eps", "not a finite number"),
    "theta beyond floats": ({"rope_theta": 10**400}, "rope_theta", "not a finite number"),
    "theta as text": ({"rope_theta": "1e4"}, "rope_theta", "not a number"),
    "other activation": ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
    "tie as number": ({"tie_word_embeddings": 1}, "tie_word_embeddings", "not true or false"),
    "bias as text": ({"attention_bias": "no"}, "attention_bias", "not true or false"),
    "groups unsaid": ({"quantization": {"bits": 4}}, "quantization.group_size", "missing"),
    "odd groups": (
        {"quantization": {"bits": 4, "group_size": 48}}, "quantization.group_size", "not one of 32",
    ),
    "odd bits": (
        {"quantization": {"bits": 7, "group_size": 64}}, "quantization.bits", "not one of 2, 3, 4",
    ),
    "other packing": (
        {"quantization": {"bits": 4, "group_size": 32, "mode": "int4"}},
        "quantization.mode", "'int4' is not supported; affine, mxfp4, mxfp8, nvfp4 are",
    ),
    "one tensor's own odd bits": (
        {"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 7, "group_size": 64}}},
        "quantization.lm_head.bits", "not one of 2, 3, 4",
    ),
    "one tensor's other packing": (
        {"quantization": {"bits": 4, "group_size": 64,
                          "lm_head": {"bits": 8, "group_size": 32, "mode": "fp8"}}},
        "quantization.lm_head.mode", "'fp8'",
    ),
    "one tensor's unknown setting": (
        {"quantization": {"bits": 4, "group_size": 64,
                          "lm_head": {"bits": 8, "group_size": 32, "scheme": "fp4"}}},
        "quantization.lm_head.scheme", "not a setting",
    ),
    "one tensor's packing as number": (
        {"quantization": {"bits": 4, "group_size": 64, "lm_head": 8}},
        "quantization.lm_head", "not an object",
    ),
    "packing as text": ({"quantization": "4bit"}, "quantization", "not an object"),
    "two packings": (
        {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 8}},
        "quantization_config", "contradicts",
    ),
    "floats in other groups": (
        {"quantization": {"bits": 4, "group_size": 64, "mode": "mxfp4"}},
        "quantization.group_size", "64 is not in 32..32",
    ),
    "floats of other bits": (
        {"quantization": {"bits": 8, "group_size": 16, "mode": "nvfp4"}},
        "quantization.bits", "8 is not in 4..4",
    ),
    "quantised elsewhere": (
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config.quant_method", "'gptq' is not supported; fp8, modelopt",
    ),
    "quantised by a number": ({"quantization_config": 8}, "quantization_config", "not an object"),
    "8-bit floats in no blocks": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config.weight_block_size", "None is not a list of two",
    ),
    "blocks of nothing": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
        "quantization_config.weight_block_size", "a size not in 1..",
    ),
    "8-bit floats of another kind": (
        {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
        "quantization_config.fmt", "'e5m2' is not supported, only 'e4m3'",
    ),
    "activations scaled beforehand": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        "quantization_config.activation_scheme", "'static'",
    ),
    "another of ModelOpt's": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        "quantization_config.quant_algo", "'FP8' is not supported, only 'NVFP4'",
    ),
    "partly rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    "rope interleaved": ({"rope_interleaved": True}, "rope_interleaved", "not supported"),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding",
    ),
    "unknown layers": ({"layer_types": ["full_attention", "conv"]}, "layer_types", "'conv'"),
    "layers not listed": ({"layer_types": "full_attention"}, "layer_types", "not a list"),
    "too few layers": ({"layer_types": ["full_attention"]}, "layer_types", "names 1 layers of 2"),
    "rope as list": ({"rope_scaling": []}, "rope_scaling", "not an object"),
    "rope without kind": ({"rope_scaling": {"factor": 2.0}}, "rope_scaling", "no rope_type"),
    "yarn without factor": (
        {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor", "missing",
    ),
    "yarn without context": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling.original_max_position_embeddings", "missing",
    ),
    "yarn that shortens": (
        {"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor", "below 1",
    ),
    "yarn betas crossed": (
        {"rope_scaling": {**YARN, "beta_fast": 0.5}}, "rope_scaling.beta_fast", "below beta_slow",
    ),
    "yarn over no base": (
        {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_scaling.rope_theta", "not above 1",
    ),
    "yarn gain below nothing": (
        {"rope_scaling": {**YARN, "mscale": -1, "mscale_all_dim": 1}},
        "rope_scaling.mscale", "above 0",
    ),
    "yarn of no attention": (
        {"rope_scaling": {**YARN, "attention_factor": 0}},
        "rope_scaling.attention_factor", "above 0",
    ),
    "dynamic without factor": (
        {"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor", "missing",
    ),
    "rope kind not a word": ({"rope_scaling": {"type": 3}}, "rope_scaling.type", "3"),
    "linear without factor": (
        {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "missing",
    ),
    "llama3 without factors": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
        "rope_scaling.low_freq_factor", "missing",
    ),
    "llama3 factors crossed": (
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor", "not above",
    ),
    "newer spelling": (
        {"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type", "'su'",
    ),
    "two spellings that differ": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3},
        "rope_scaling", "contradicts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREACHES)
def test_a_wrong_key_is_named(name: str) -> None:
    """A missing, mistyped, out-of-range or unsupported key is refused by its own name."""
    changes, field, words = BREACHES[name]

    with pytest.raises(InvalidModel) as caught:
        parse_llama(config_with(**changes))

    assert (caught.value.file, caught.value.field) == ("config.json", field)
    assert words in caught.value.problem


def test_defaults_follow_the_family() -> None:
    """What a config leaves out has the family's meaning."""
    config = parse_llama(config_with(num_key_value_heads=None, rope_theta=None, head_dim=None))

    assert (config.kv_heads, config.head_dim, config.tied_head) == (4, 8, False)
    assert config.rope == RopeConfig(base=10000.0)


def test_real_configs_parse_or_name_their_key() -> None:
    """Of the real configs, those of the family parse and all others are refused by a name."""
    parsed = {}
    refused = {}
    for folder in sorted(real_input("configs", "hf").iterdir()):
        try:
            config = read_model_config(folder)
            parsed[folder.name] = find_family(REGISTRY, architecture_of(config)).parse(config)
        except InvalidModel as error:
            refused[folder.name] = error.field

    assert all(refused.values())
    assert parsed["HuggingFaceTB--SmolLM2-135M-Instruct"].tied_head
    assert parsed["meta-llama--Meta-Llama-3.1-8B"].rope.scaling.factor == 8.0
    assert parsed["meta-llama--Meta-Llama-3.1-8B"].context_max == 131072
    assert parsed["Qwen--Qwen3-8B"].head_norms
    assert parsed["Qwen--Qwen3-Coder-480B-A35B-Instruct"].experts.count == 160
