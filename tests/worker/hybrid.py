"""Small random Qwen3.5 models on disk, as published and as mlx-lm converts them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.worker.tiny import random_weights, write_model

ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
HYBRID_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}


def hybrid_config(**changes: Any) -> dict[str, Any]:
    """Return the base config with `changes`; a value of None takes the key away."""
    merged = {**HYBRID_CONFIG, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def hybrid_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, mx.array]:
    """Return weights as published: norms as their distance from one, slow and fast decays."""
    weights = random_weights(config, seed=seed)
    for name, array in weights.items():
        if "norm" in name and not name.endswith("linear_attn.norm.weight"):
            weights[name] = array - 1
        elif name.endswith("A_log"):
            weights[name] = 2 * array - 2
    return weights


def converted(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return published weights in mlx-lm's layout."""
    made = dict(weights)
    for name, array in weights.items():
        if name.endswith("conv1d.weight"):
            made[name] = mx.contiguous(array.swapaxes(1, 2))
        elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
            made[name] = array + 1
    return made


def write_hybrid(folder: Path, **changes: Any) -> Path:
    """Write a model with these changes of its config; return `folder`."""
    config = hybrid_config(**changes)
    return write_model(folder, config, hybrid_weights(config))
