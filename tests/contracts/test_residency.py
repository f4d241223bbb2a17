"""A worker alone and a controller choose the same life for one model in the same memory."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxd_controller.core import fit
from mlxd_controller.store.caches import cache_sizes, projected_values
from mlxd_shared.config import GIB, ROWS_MAX_DEFAULT
from mlxd_shared.requests import LoadSpec, Weights
from mlxd_worker.memory.residency import (
    DeviceKind,
    FloatType,
    WeightsChoice,
    open_contexts,
    plan_residency,
)
from mlxd_worker.models.config import parse_llama
from mlxd_worker.models.llama import llama_footprint, llama_tensors
from mlxd_worker.resident import demand_of

SMALL: dict[str, Any] = {
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
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}


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
    model = parse_llama(config)
    values = sum(math.prod(spec.shape) for spec in llama_tensors(model) if spec.required)
    facts = fit.ModelFacts(
        architecture="LlamaForCausalLM",
        stored_bytes=2 * values,
        elements=values,
        item_bytes=2,
        heads=model.heads,
        caches=cache_sizes(config, "LlamaForCausalLM"),
        projected_values=projected_values(config, "LlamaForCausalLM"),
        hidden_size=model.hidden,
        intermediate_size=model.mlp,
        vocab_size=model.vocab,
        context_length_max=model.context_max,
    )
    budget = budget_gib * GIB
    device = fit.Device("cpu", "cpu", budget, 0, budget, budget)

    alone = plan_residency(
        demand_of(
            llama_footprint(model), weights=values, stored=FloatType.BF16, rows_max=ROWS_MAX_DEFAULT
        ),
        contexts=open_contexts(model.context_max),
        device=DeviceKind.CPU,
        choice=WeightsChoice.AUTO,
        budget_nbytes=budget,
    )
    told = fit.plan(facts, LoadSpec(), device)

    assert (alone.form, alone.context_length, alone.fits) == (form, context, True)
    as_told = Weights.FLOAT32 if form is FloatType.F32 else Weights.STORED
    assert (told.weights, told.context_length) == (as_told, context)
