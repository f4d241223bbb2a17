"""A worker alone and a controller choose the same life for one model in the same memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxd_controller.core import fit
from mlxd_models.families.registry import REGISTRY
from mlxd_models.sizes.arena_sizes import capacity_classes, slots_bound
from mlxd_models.sizes.cache_sizes import RECURRENT_STEP_LAYERS, CacheSizes, WindowedLayers
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.config import GIB, MIB, ROWS_MAX_DEFAULT
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.memory.residency import (
    DeviceKind,
    ResidencyPlan,
    WeightsChoice,
    open_contexts,
    plan_residency,
)
from mlxd_worker.thread.resident import demand_of

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LARGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
EXPERTS: dict[str, Any] = {
    **LARGE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
GEMMA: dict[str, Any] = {
    **LARGE,
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "head_dim": 256,
    "sliding_window": 1024,
}
SINKS: dict[str, Any] = {
    **LARGE,
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "head_dim": 64,
    "vocab_size": 201_088,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_theta": 150_000,
    "rope_scaling": {"rope_type": "default"},
}
HYBRID: dict[str, Any] = {
    **LARGE,
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
LATENT: dict[str, Any] = {
    **LARGE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
GLM: dict[str, Any] = {
    **LATENT,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 9,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3,
    "rope_theta": 1e6,
}
NEXT: dict[str, Any] = {
    **HYBRID,
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
MOE: dict[str, Any] = {
    **{key: value for key, value in NEXT.items() if key != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts_per_tok": 1,
    "shared_expert_intermediate_size": 30_000,
}
ALL = {
    "attention": LARGE,
    "hybrid": HYBRID,
    "experts": EXPERTS,
    "sliding": GEMMA,
    "sinks": SINKS,
    "latent": LATENT,
    "glm": GLM,
    "hybrid of experts": NEXT,
    "wide shared expert": MOE,
}

SAME = ("weights", "kv", "prefix", "activations", "pool")
"""Terms that both sides have; the process is the controller's to reckon with."""


def told_by_controller(config: dict[str, Any], budget: int, spec: LoadSpec) -> fit.Plan:
    """Return the controller's plan of 16-bit weights on a CPU."""
    values = weight_values(config)
    found = REGISTRY.find(*config["architectures"])
    footprint = found.footprint(found.parse(config))
    facts = fit.ModelFacts(
        architecture=config["architectures"][0],
        stored_bytes=2 * values,
        elements=values,
        item_bytes=2,
        heads=footprint.passes.heads,
        caches=footprint.caches,
        projected_values=footprint.passes.projected,
        recurrent_values=footprint.passes.recurrent,
        hidden_size=footprint.passes.hidden,
        intermediate_size=footprint.passes.mlp,
        vocab_size=footprint.vocab,
        context_length_max=footprint.context_max,
    )
    return fit.plan(facts, spec, fit.Device("cpu", "cpu", budget, 0, budget, budget))


def chosen_alone(config: dict[str, Any], budget: int, spec: LoadSpec) -> ResidencyPlan:
    """Return the plan of a worker that was given nothing but `spec`."""
    (architecture,) = config["architectures"]
    found = REGISTRY.find(architecture)
    footprint = found.footprint(found.parse(config))
    asked = spec.context_length
    return plan_residency(
        demand_of(
            footprint,
            weights=weight_values(config),
            stored=FloatType.BF16,
            rows_max=spec.rows_max or ROWS_MAX_DEFAULT,
            kv_format=spec.kv_format or KVFormat.MODEL,
            device=DeviceKind.CPU,
        ),
        contexts=(asked,) if asked else open_contexts(footprint.context_max),
        device=DeviceKind.CPU,
        choice=WeightsChoice.AUTO,
        budget_nbytes=budget,
        prefix_cache_nbytes=spec.prefix_cache_nbytes,
    )


def weight_values(config: dict[str, Any]) -> int:
    """Return how many values the weights have."""
    found = REGISTRY.find(*config["architectures"])
    tensors = found.tensors(found.parse(config))
    return sum(math.prod(spec.shape) for spec in tensors if spec.required)


@pytest.mark.parametrize(
    ("config", "budget_gib", "form", "context"),
    [
        (SMALL, 1, FloatType.BF16, 4096),
        (SMALL, 2, FloatType.F32, 4096),
        (SMALL, 8, FloatType.F32, 8192),
        (LARGE, 20, FloatType.BF16, 8192),
        (LARGE, 40, FloatType.F32, 8192),
        (LARGE, 64, FloatType.F32, 16_384),
        (LARGE, 400, FloatType.F32, 131_072),
    ],
)
def test_both_sides_choose_alike(
    config: dict[str, Any], budget_gib: int, form: FloatType, context: int
) -> None:
    """Form and context are the same, whoever plans: 135 million and 8 billion values as bf16."""
    budget = budget_gib * GIB
    alone = chosen_alone(config, budget, LoadSpec())
    told = told_by_controller(config, budget, LoadSpec())

    assert (alone.form, alone.context_length, alone.fits) == (form, context, True)
    as_told = Weights.FLOAT32 if form is FloatType.F32 else Weights.STORED
    assert (told.weights, told.context_length) == (as_told, context)


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("prefix_nbytes", [None, 0, 123 * MIB])
def test_both_sides_reckon_caches_alike(
    config: dict[str, Any], kv_format: KVFormat, prefix_nbytes: int | None
) -> None:
    """Keys, values and states take the same to the byte in every format, and so do former prompts,
    activations and the pool."""
    spec = LoadSpec(4096, 8, kv_format=kv_format, prefix_cache_nbytes=prefix_nbytes)
    alone = chosen_alone(config, 400 * GIB, spec)
    told = told_by_controller(config, 400 * GIB, spec)

    theirs = {term.name: term.nbytes for term in told.terms}
    mine = {term.name: term.nbytes for term in alone.terms}
    assert {name: mine[name] for name in SAME} == {name: theirs[name] for name in SAME}
    assert alone.prefix_cache_nbytes == told.prefix_bytes


@pytest.mark.parametrize("context", [1000, 8192])
@pytest.mark.parametrize("kv_format", KVFormat)
def test_arenas_take_what_was_reckoned(context: int, kv_format: KVFormat) -> None:
    """Real caches of every kind, filled to the bounds of tokens and slots, hold to the byte what
    the fit said: whole layers, a window that slides or is as wide as the rows, and states, with
    what a step takes to replace them."""
    rows_max, kv_heads, head_dim, window = 4, 2, 64, 1024
    per_layer = 2 * kv_heads * head_dim
    sizes = CacheSizes(
        kv_values_per_token=2 * per_layer,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(WindowedLayers(window, per_layer),),
        recurrent_values_per_row=12,
        recurrent_layers=1,
    )
    capacity = capacity_classes(context, rows_max)[-1]
    slots = slots_bound(rows_max)
    geometry = [AttentionGeometry(kv_heads, head_dim, size) for size in (None, None, window)]
    caches = [g.new_cache(mx.float16, kv=kv_format, context_max=context) for g in geometry]
    state = RecurrentCache([RowState("state", (3, 4), mx.float32)])

    sliding = caches[2].kind is Kind.ROTATING
    assert sliding == (context == 8192)
    expected = sum(cache.slot_nbytes(capacity) * rows_max for cache in caches[:2])
    expected += caches[2].slot_nbytes(capacity) * (slots if sliding else rows_max)
    expected += state.slot_nbytes(capacity) * rows_max * (1 + RECURRENT_STEP_LAYERS)
    held = sizes.held(context_max=context, rows_max=rows_max, kv_format=kv_format, on_cpu=True)
    assert held.nbytes(2) == expected
    alone = replace(sizes, kv_values_per_token=0)
    for on_cpu, count in ((True, rows_max), (False, slots)):
        held = alone.held(
            context_max=context, rows_max=rows_max, kv_format=KVFormat.MODEL, on_cpu=on_cpu
        )
        ring = caches[2].slot_nbytes(capacity) * (count if sliding else rows_max)
        states = state.slot_nbytes(capacity) * rows_max * (1 + RECURRENT_STEP_LAYERS)
        assert held.nbytes(2) == ring + states
