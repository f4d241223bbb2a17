"""Small random models that keep latents, on disk: as published, and as mlx-lm converts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxd_models.families.common.experts import ExpertsConfig
from mlxd_models.families.latent.config import LatentConfig
from mlxd_worker.models.loader import inspect_model
from tests.worker.kin import kin_weights, quantise
from tests.worker.tiny import write_model

YARN: Mapping[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
DEEPSEEK_V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 40,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
    "vocab_size": 61,
}
DEEPSEEK_V2: Mapping[str, Any] = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
}
GLM4: Mapping[str, Any] = {
    **DEEPSEEK_V3,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
}
WHOLE = (".mlp.gate.weight",)
"""What the converter leaves as numbers."""


def latent_weights(config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return weights as published; corrections of experts from 0 up."""
    weights = kin_weights(config)
    for name, array in weights.items():
        if name.endswith("e_score_correction_bias"):
            weights[name] = mx.abs(array)
    return weights


def absorb(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return published weights with queries' and values' matrices apart, as mlx-lm has them."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    tensors = dict(weights)
    for name in weights:
        if name.endswith("kv_b_proj.weight"):
            both = tensors.pop(name).reshape(heads, -1, config["kv_lora_rank"])
            stem = name.removesuffix("kv_b_proj.weight")
            tensors[f"{stem}embed_q.weight"] = mx.contiguous(both[:, :plain].swapaxes(1, 2))
            tensors[f"{stem}unembed_out.weight"] = mx.contiguous(both[:, plain:])
    return tensors


def write_latent(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model as published; return `folder`."""
    return write_model(folder, config, latent_weights(config))


def packed_latent(
    config: Mapping[str, Any], **settings: Any
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return config and weights as mlx-lm's converter writes them.

    Queries' and values' matrices are apart, but for a DeepSeek-V2's.
    """
    weights = latent_weights(config)
    apart = config["model_type"] != "deepseek_v2"
    stored = absorb(config, weights) if apart else weights
    return quantise(config, stored, whole=WHOLE, **settings)


def parsed_latent(folder: Path) -> LatentConfig:
    """Return the parsed config of the model in `folder`."""
    return cast("LatentConfig", inspect_model(folder).config)


def decoder_with(config: LatentConfig, **changes: Any) -> dict[str, Any]:
    """Return a change of what the model shares with a Llama."""
    return {"decoder": replace(config.decoder, **changes)}


def rope_with(config: LatentConfig, **changes: Any) -> dict[str, Any]:
    """Return a change of the rotation."""
    return decoder_with(config, rope=replace(config.decoder.rope, **changes))


def routing_with(config: LatentConfig, **changes: Any) -> dict[str, Any]:
    """Return a change of how experts are chosen."""
    experts = cast("ExpertsConfig", config.decoder.experts)
    return decoder_with(config, experts=replace(experts, **changes))
