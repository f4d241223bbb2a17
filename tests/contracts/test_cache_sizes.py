"""A controller and a worker read the same sizes of caches out of one config.json."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_controller.store.caches import cache_sizes
from mlxd_worker.models.registry import REGISTRY

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
