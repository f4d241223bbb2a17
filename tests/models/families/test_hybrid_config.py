"""config.json of a Qwen3.5: every key is taken, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mlxd_models.families.hybrid.qwen3_5 import parse_qwen3_5
from mlxd_models.families.hybrid.tensors import qwen3_5_tensors
from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from mlxd_shared.domain.errors import InvalidModel
from tests.real_inputs import real_input
from tests.worker.hybrid import ROPE, hybrid_config

LINEAR, FULL = "linear_attention", "full_attention"

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("num_experts", {"num_experts": 8}),
    "nested": ("text_config", {"text_config": {"hidden_size": 32}}),
    "pictures": ("vision_config", {"vision_config": {"depth": 2}}),
    "no-gate": ("attn_output_gate", {"attn_output_gate": False}),
    "sliding": ("use_sliding_window", {"use_sliding_window": True}),
    "rounded-state": ("mamba_ssm_dtype", {"mamba_ssm_dtype": "bfloat16"}),
    "mlp-bias": ("mlp_bias", {"mlp_bias": True}),
    "activation": ("hidden_act", {"hidden_act": "gelu"}),
    "quantised": ("quantization_config.quant_method", {"quantization_config": {"bits": 4}}),
    "heads": ("linear_num_value_heads", {"linear_num_value_heads": 3}),
    "no-key-heads": ("linear_num_key_heads", {"linear_num_key_heads": None}),
    "key-width": ("linear_key_head_dim", {"linear_key_head_dim": 0}),
    "value-width": ("linear_value_head_dim", {"linear_value_head_dim": "12"}),
    "no-kernel": ("linear_conv_kernel_dim", {"linear_conv_kernel_dim": None}),
    "kernel-1": ("linear_conv_kernel_dim", {"linear_conv_kernel_dim": 1}),
    "huge-kernel": ("linear_conv_kernel_dim", {"linear_conv_kernel_dim": 65}),
    "interval-0": ("full_attention_interval", {"full_attention_interval": 0}),
    "all-full": ("layer_types", {"full_attention_interval": 1}),
    "contradiction": ("layer_types", {"layer_types": [FULL, LINEAR, FULL, LINEAR]}),
    "other-kind": ("layer_types", {"layer_types": ["sliding_attention"] * 4}),
    "too-few-kinds": ("layer_types", {"layer_types": [LINEAR, FULL]}),
    "no-theta": ("rope_theta", {"rope_parameters": {"rope_type": "default"}}),
    "longrope": (
        "rope_parameters.rope_type",
        {"rope_parameters": {**ROPE, "rope_type": "longrope", "factor": 4.0}},
    ),
    "odd-part": (
        "rope_parameters.partial_rotary_factor",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.1875}},
    ),
    "part-over-1": (
        "rope_parameters.partial_rotary_factor",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.25}},
    ),
    "two-parts": ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str) -> None:
    """A key that would change the arithmetic unheard is an error that names it."""
    field, changes = REFUSED[name]

    with pytest.raises(InvalidModel) as refused:
        parse_qwen3_5(hybrid_config(**changes))

    assert refused.value.field == field


def test_the_keys_are_taken() -> None:
    """Shape, layers and rotary part are the config's; a quarter of a head rotates by default."""
    rope = {"rope_type": "default", "rope_theta": 77.0}
    config = parse_qwen3_5(hybrid_config(rope_parameters=rope, attention_bias=True))
    delta = config.delta

    assert config.full == (False, True, False, True)
    assert config.rotary_dim == 4
    assert config.decoder.rope.base == 77.0
    assert config.decoder.qkv_bias
    assert (delta.keys, delta.values, delta.mixed) == (16, 48, 80)
    assert delta.projected == 80 + 48 + 8
    assert delta.state_values == 4 * 8 * 12 + 3 * 80


def test_every_fourth_layer_is_full_by_default() -> None:
    """Where neither the kinds nor the interval are given, the interval is four."""
    config = parse_qwen3_5(hybrid_config(full_attention_interval=None, num_hidden_layers=9))

    assert [index for index, full in enumerate(config.full) if full] == [3, 7]


def test_the_axes_of_pictures_change_nothing_for_a_text() -> None:
    """`mrope_section` splits a position that a text has only one of."""
    axes = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}

    assert parse_qwen3_5(hybrid_config(rope_parameters={**ROPE, **axes})) == parse_qwen3_5(
        hybrid_config()
    )


def test_a_published_config_is_understood() -> None:
    """The text half of the 27B is read whole; beside its tower, as published, it is the
    same; to the architecture that reads text alone that is refused by name."""
    path = real_input("configs", "hf", "Qwen--Qwen3.5-27B", "config.json")
    published = json.loads(path.read_text())
    text = {**published["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    config = parse_qwen3_5(text)

    assert sum(config.full) == 16
    assert config.rotary_dim == 64
    assert config.delta.state_values == 48 * 128 * 128 + 3 * 10_240
    whole = find_family(REGISTRY, architecture_of(published)).parse(published).text
    rope = replace(config.decoder.rope, sections=(11, 11, 10), mixed=True)
    assert whole == replace(config, decoder=replace(config.decoder, rope=rope))
    with pytest.raises(InvalidModel, match="text_config"):
        parse_qwen3_5(published)


def test_the_drafting_layer_is_known_and_not_required() -> None:
    """`mtp.*` may be in the file; every other tensor of an untied model must be."""
    specs = qwen3_5_tensors(parse_qwen3_5(hybrid_config()))
    optional = [spec for spec in specs if not spec.required]

    assert optional
    assert all(spec.name.startswith("mtp.") for spec in optional)
    assert ("mtp.fc.weight", (32, 64)) in {(spec.name, spec.shape) for spec in optional}
    assert len({spec.name for spec in specs}) == len(specs)
