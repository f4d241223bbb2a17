"""A controller and a worker read the same sizes of caches out of one config.json."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_controller.store.caches import cache_sizes, feed_width
from mlxd_models.families.registry import REGISTRY

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 4096,
}
HYBRID: dict[str, Any] = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
OSS: dict[str, Any] = {
    "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "default"},
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"head_dim": 24}),
    "llama named": ("LlamaForCausalLM", {"layer_types": [FULL] * 3, "sliding_window": 8}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 100}),
    "mistral without": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral as long as the context": ("MistralForCausalLM", {"sliding_window": 4096}),
    "mistral mixed": (
        "MistralForCausalLM", {"sliding_window": 9, "layer_types": [FULL, SLIDING, FULL]},
    ),
    "qwen2 not used": ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 0}),
    "qwen2 defaults": ("Qwen2ForCausalLM", {"use_sliding_window": True}),
    "qwen2 default window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192},
    ),
    "qwen2 later layers": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen2 named": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen3 not used": (
        "Qwen3ForCausalLM", {"head_dim": 32, "sliding_window": 8, "max_window_layers": 0},
    ),
    "qwen3 later layers": (
        "Qwen3ForCausalLM",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3 default window": (
        "Qwen3ForCausalLM",
        {
            "head_dim": 32, "use_sliding_window": True, "max_window_layers": 0,
            "max_position_embeddings": 8192,
        },
    ),
    "experts": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 32}),
    "gemma 3 default pattern": (
        "Gemma3ForCausalLM", {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 13},
    ),
    "gemma 3 patterns": (
        "Gemma3ForCausalLM", {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "gemma 3 pattern, newer key": (
        "Gemma3ForCausalLM", {"head_dim": 32, "sliding_window": 8, "_sliding_window_pattern": 3},
    ),
    "gemma 3 named": (
        "Gemma3ForCausalLM",
        {"head_dim": 32, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "gemma 3 window as long as the context": (
        "Gemma3ForCausalLM", {"head_dim": 32, "sliding_window": 4096},
    ),
    "gpt-oss": ("GptOssForCausalLM", {**OSS, "sliding_window": 8}),
    "gpt-oss named": (
        "GptOssForCausalLM",
        {**OSS, "sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING]},
    ),
    "gpt-oss window as long as the context": (
        "GptOssForCausalLM", {**OSS, "sliding_window": 4096},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", {**HYBRID, "full_attention_interval": 3}),
    "qwen3.5 named": (
        "Qwen3_5ForCausalLM", {**HYBRID, "layer_types": [FULL, "linear_attention", FULL]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_both_sides_find_the_same_sizes(name: str) -> None:
    """What each kind of layer remembers is the same, whoever reads the config."""
    architecture, changes = CONFIGS[name]
    config = {**BASE, **changes}
    found = REGISTRY.find(architecture)

    assert cache_sizes(config, architecture) == found.footprint(found.parse(config)).caches


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 2 * (64 + 24)),
        ({"num_experts_per_tok": 1}, 64 + 24),
        ({"num_experts_per_tok": 1, "mlp_only_layers": [1]}, 96),
        ({"decoder_sparse_step": 2}, 2 * (64 + 24)),
        ({"mlp_only_layers": [0, 1, 2]}, 96),
        ({"decoder_sparse_step": 4}, 96),
    ],
)
def test_both_sides_find_the_same_width_of_experts(changes: dict[str, Any], width: int) -> None:
    """The widest part of what a position's experts make is the same, whoever reads the config."""
    config = {**BASE, **EXPERTS, **changes}
    architecture = REGISTRY.find("Qwen3MoeForCausalLM")

    assert feed_width(config, "Qwen3MoeForCausalLM") == width
    assert architecture.parse(config).feed_width == width


def test_both_sides_find_the_same_width_of_gpt_oss() -> None:
    """All layers have experts, whose inner width is the config's only one."""
    config = {**BASE, **OSS, "sliding_window": 8}
    architecture = REGISTRY.find("GptOssForCausalLM")

    assert feed_width(config, "GptOssForCausalLM") == 2 * (64 + 96)
    assert architecture.parse(config).feed_width == 2 * (64 + 96)
