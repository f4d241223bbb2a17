"""Random models of any width on disk, whole folders for a worker: dense, sliding and hybrid.

Weights are float32 and the same on every machine for one seed. Whatever the widths, the tokenizer
is the tiny model's, of 320 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from tests.bench.models import Shape
from tests.support.tiny_model import VOCAB, write_float32, write_json, write_text_files
from tests.worker.made_tokenizers import BOS_ID, EOS_ID

TINY = Shape(hidden=32, layers=4, heads=4, kv_heads=2, mlp=64, context=512)
DEMO = Shape(hidden=256, layers=6, heads=8, kv_heads=4, mlp=704, context=8192)
"""As wide as the built-in model."""
LARGE = Shape(hidden=512, layers=8, heads=8, kv_heads=8, mlp=1376, context=8192)
"""A little over 100 MB in float32."""

SPREAD = 1.5
"""Of the weights: wide enough that greedy output does not fall into a loop at once."""


def write_dense_model(folder: Path, *, shape: Shape = TINY, seed: int = 1) -> Path:
    """Write a Llama, whose layers all remember everything; return `folder`."""
    return write_random_model(folder, decoder_config("LlamaForCausalLM", shape), seed=seed)


def write_sliding_model(
    folder: Path, *, window: int, mixed: bool, shape: Shape = TINY, seed: int = 1
) -> Path:
    """Write a model with windows of `window` positions; return `folder`.

    mixed: a Qwen2 whose layers slide and remember everything by turns; else a Mistral, whose layers
    all slide.
    """
    if mixed:
        kinds = ["full_attention" if index % 2 else "sliding_attention"
                 for index in range(shape.layers)]  # fmt: skip
        config = decoder_config(
            "Qwen2ForCausalLM",
            shape,
            use_sliding_window=True,
            sliding_window=window,
            layer_types=kinds,
        )
    else:
        config = decoder_config("MistralForCausalLM", shape, sliding_window=window)
    return write_random_model(folder, config, seed=seed)


def write_hybrid_model(folder: Path, *, shape: Shape = TINY, seed: int = 1) -> Path:
    """Write a Qwen3.5; return `folder`. At `LARGE`, a little over 100 MB in float32."""
    return write_random_model(folder, hybrid_config(shape), seed=seed)


def write_latent_model(folder: Path, *, shape: Shape = TINY, seed: int = 1) -> Path:
    """Write a DeepSeek-V3: latents, experts in groups, one dense layer; return `folder`."""
    return write_random_model(folder, latent_config(shape), seed=seed)


def write_expert_hybrid_model(folder: Path, *, shape: Shape = TINY, seed: int = 1) -> Path:
    """Write a Qwen3-Next: recurrent layers, experts and a shared one; return `folder`."""
    return write_random_model(folder, expert_hybrid_config(shape), seed=seed)


def hybrid_config(shape: Shape) -> dict[str, Any]:
    """Return the config of a Qwen3.5, three recurrent layers to a full one.

    Its recurrent layers hold as many values as the shape has heads, of the same width, two to a
    key.
    """
    head_dim = shape.hidden // shape.heads
    return decoder_config(
        "Qwen3_5ForCausalLM",
        shape,
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        full_attention_interval=4,
        linear_num_key_heads=shape.heads // 2,
        linear_num_value_heads=shape.heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_conv_kernel_dim=4,
    )


def latent_config(shape: Shape, **more: Any) -> dict[str, Any]:
    """Return a DeepSeek-V3's config.json: latents twice as wide as a head, eight small experts."""
    head_dim = shape.hidden // shape.heads
    own = {
        "num_key_value_heads": shape.heads,
        "kv_lora_rank": 2 * head_dim,
        "q_lora_rank": 3 * head_dim,
        "qk_rope_head_dim": head_dim,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.mlp // 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }
    return decoder_config("DeepseekV3ForCausalLM", shape, **own | more)


def expert_hybrid_config(shape: Shape, **more: Any) -> dict[str, Any]:
    """Return a Qwen3-Next's config.json: three recurrent layers to a full one, eight experts."""
    head_dim = shape.hidden // shape.heads
    own = {
        "head_dim": head_dim,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": shape.heads // 2,
        "linear_num_value_heads": shape.heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.mlp // 4,
        "shared_expert_intermediate_size": shape.mlp // 2,
        "norm_topk_prob": True,
    }
    return decoder_config("Qwen3NextForCausalLM", shape, **own | more)


def decoder_config(architecture: str, shape: Shape, **more: Any) -> dict[str, Any]:
    """Return the config.json of a decoder with a tied head."""
    return {
        "architectures": [architecture],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": VOCAB,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **more,
    }


def write_random_model(folder: Path, config: Mapping[str, Any], *, seed: int = 1) -> Path:
    """Write a model of any registered architecture, with every tensor that it requires.

    Norms are ones, biases small, decays slow and fast, and all else spread by its fan-in.
    """
    write_text_files(folder)
    write_json(folder / "config.json", dict(config))
    architecture = find_family(REGISTRY, architecture_of(config))
    specs = [spec for spec in architecture.tensors(architecture.parse(config)) if spec.required]
    shapes = {spec.name: spec.shape for spec in specs}
    write_float32(folder / "model.safetensors", shapes, _contents(specs, seed))
    return folder


def _contents(specs: list[TensorSpec], seed: int) -> Iterator[bytes]:
    draws = np.random.Generator(np.random.PCG64(seed))
    for spec in specs:
        if "norm" in spec.name:
            values = np.ones(spec.shape, dtype=np.float32)
        elif spec.name.endswith("A_log"):
            # A token leaves between a hundredth and nearly all of what was there.
            values = np.log(draws.uniform(0.002, 4.0, spec.shape)).astype(np.float32)
        else:
            biased = spec.name.endswith("bias")
            spread = 0.1 if biased else SPREAD / math.sqrt(spec.shape[-1])
            values = draws.standard_normal(spec.shape, dtype=np.float32) * np.float32(spread)
        yield values.astype("<f4").tobytes()
