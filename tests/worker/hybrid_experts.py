"""Small random Qwen3-Next and Qwen3.5-MoE models on disk, as published and as converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxd_models.families.common.experts import ExpertsConfig
from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_worker.models.loader import inspect_model
from tests.worker.hybrid import HYBRID_CONFIG, convert, hybrid_weights
from tests.worker.kin import quantise, stack_experts
from tests.worker.tiny import write_model

NEXT: Mapping[str, Any] = {
    **{key: value for key, value in HYBRID_CONFIG.items() if key != "rope_parameters"},
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
_NEXT_ONLY = ("intermediate_size", "rope_theta", "partial_rotary_factor")
MOE: Mapping[str, Any] = {
    **{key: value for key, value in NEXT.items() if key not in _NEXT_ONLY},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe",
    "rope_parameters": ROPE,
}
WHOLE = ("conv1d.weight",)
"""What the converter leaves as numbers."""


def expert_weights(config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return weights as published: a Qwen3.5-MoE's experts fused, a Qwen3-Next's one by one."""
    fused = config["model_type"] == "qwen3_5_moe"
    stored: dict[str, mx.array] = {}
    loose = hybrid_weights(config)
    for name, array in loose.items():
        before, switch, linear = name.removesuffix(".weight").partition(".switch_mlp.")
        if not switch:
            stored[name] = array
        elif not fused:
            for expert in range(array.shape[0]):
                part = f"{before}.experts.{expert}.{linear}.weight"
                stored[part] = mx.contiguous(array[expert])
        elif linear == "down_proj":
            stored[f"{before}.experts.down_proj"] = array
        elif linear == "gate_proj":
            up = loose[f"{before}.switch_mlp.up_proj.weight"]
            stored[f"{before}.experts.gate_up_proj"] = mx.concatenate([array, up], axis=1)
    return stored


def unfuse(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return weights in mlx-lm's layout: one tensor for a linear of all experts."""
    tensors = convert(weights)
    for name in weights:
        before, experts, linear = name.partition(".experts.")
        if experts and linear == "gate_up_proj":
            gate, up = mx.split(tensors.pop(name), 2, axis=1)
            tensors[f"{before}.switch_mlp.gate_proj.weight"] = mx.contiguous(gate)
            tensors[f"{before}.switch_mlp.up_proj.weight"] = mx.contiguous(up)
        elif experts and linear == "down_proj":
            tensors[f"{before}.switch_mlp.down_proj.weight"] = tensors.pop(name)
    return stack_experts(tensors)


def write_experts(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model as published; return `folder`."""
    return write_model(folder, config, expert_weights(config))


def packed_experts(
    config: Mapping[str, Any], **settings: Any
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return config and weights as mlx-lm's converter writes them."""
    return quantise(config, unfuse(expert_weights(config)), whole=WHOLE, **settings)


def parsed_hybrid(folder: Path) -> HybridConfig:
    """Return the parsed config of the model in `folder`."""
    return cast("HybridConfig", inspect_model(folder).config)


def routing_with(config: HybridConfig, **changes: Any) -> dict[str, Any]:
    """Return a change of how experts are chosen."""
    experts = cast("ExpertsConfig", config.decoder.experts)
    return {"decoder": replace(config.decoder, experts=replace(experts, **changes))}
