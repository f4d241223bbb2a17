"""What a model's layers remember, as its config.json says it, by kind."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from mlxd_controller.store.caches import (
    cache_sizes,
    feed_width,
    projected_values,
    recurrent_values,
)
from mlxd_controller.store.fields import LAYERS_MAX
from mlxd_models.sizes.cache_sizes import CacheSizes, WindowedLayers
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import KVFormat

PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}
LAYER = 2 * 2 * 8
"""Keys and values of one position in one layer."""
WHOLE = CacheSizes(kv_values_per_token=4 * LAYER, kv_heads=2, head_dim=8)
HYBRID: dict[str, Any] = {
    **PLAIN,
    "head_dim": 16,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
RECURRENT = 6 * 4 * 5 + 3 * (2 * 3 * 4 + 6 * 5)
"""One hybrid layer's recurrence, and three inputs of its convolution."""


def windowed(window: int, *, layers: int) -> CacheSizes:
    """Return PLAIN's sizes where `layers` of the four have a window."""
    return CacheSizes(
        kv_values_per_token=(4 - layers) * LAYER,
        kv_heads=2,
        head_dim=8,
        windows=(WindowedLayers(window, layers * LAYER),),
    )


@pytest.mark.parametrize(
    ("architecture", "values", "expected"),
    [
        ("LlamaForCausalLM", {}, WHOLE),
        ("LlamaForCausalLM", {"sliding_window": 64}, WHOLE),
        ("MistralForCausalLM", {}, WHOLE),
        ("MistralForCausalLM", {"sliding_window": None}, WHOLE),
        ("MistralForCausalLM", {"sliding_window": 1024}, windowed(1024, layers=4)),
        ("MistralForCausalLM", {"sliding_window": 8192}, WHOLE),
        (
            "MistralForCausalLM",
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
            windowed(64, layers=2),
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 64}, WHOLE),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
            windowed(64, layers=1),
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": 0},
            windowed(4096, layers=4),
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, WHOLE),
    ],
)
def test_layers_with_a_window_are_told_apart(
    architecture: str, values: dict[str, Any], expected: CacheSizes
) -> None:
    """By the architecture's own rule or layer by layer; a window as wide as the context is none."""
    assert cache_sizes({**PLAIN, **values}, architecture) == expected


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        ({}, 1),
        ({"full_attention_interval": 2}, 2),
        ({"layer_types": ["linear_attention"] + ["full_attention"] * 3}, 3),
    ],
)
def test_recurrent_layers_keep_a_state_and_no_keys(values: dict[str, Any], whole: int) -> None:
    """Every fourth layer attends unless the config says otherwise; the rest keep a fixed state."""
    found = cache_sizes({**HYBRID, **values}, "Qwen3_5ForCausalLM")

    assert found == CacheSizes(
        kv_values_per_token=whole * 2 * 2 * 16,
        kv_heads=2,
        head_dim=16,
        recurrent_values_per_row=(4 - whole) * RECURRENT,
        recurrent_layers=4 - whole,
    )


def test_the_widest_projection_counts() -> None:
    """Queries, keys and values; in a hybrid also the gates, of whichever kind is wider, and what a
    recurrent layer makes of them in float32."""
    assert projected_values(PLAIN, "LlamaForCausalLM") == (8 + 2 * 2) * 8
    narrow = {**HYBRID, "head_dim": 64}
    assert projected_values(narrow, "Qwen3_5ForCausalLM") == (2 * 8 + 2 * 2) * 64
    wide = {**HYBRID, "linear_value_head_dim": 500}
    assert projected_values(wide, "Qwen3_5ForCausalLM") == (24 + 3000) + 3000 + 2 * 6
    assert recurrent_values(wide, "Qwen3_5ForCausalLM") == 8 * (24 + 3000)
    assert recurrent_values(PLAIN, "LlamaForCausalLM") == 0


@pytest.mark.parametrize(
    ("architecture", "values", "field"),
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window"),
        ("LlamaForCausalLM", {"layer_types": "full_attention"}, "layer_types"),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Qwen3_5ForCausalLM", {}, "linear_num_value_heads"),
    ],
)
def test_a_bad_key_is_named(architecture: str, values: dict[str, Any], field: str) -> None:
    """What the sizes follow from is there and in range, or the key is named."""
    with pytest.raises(InvalidModel) as caught:
        cache_sizes({**PLAIN, **values}, architecture)
    assert caught.value.field == field


def test_a_format_for_keys_that_no_layer_keeps_is_refused() -> None:
    """Where every layer has a window, no layer would honour the format: the option is refused."""
    sliding = windowed(128, layers=4)
    mixed = replace(windowed(128, layers=2), head_dim=64)
    assert "no layer" in (sliding.kv_format_problem(KVFormat.Q8) or "")
    assert mixed.kv_format_problem(KVFormat.Q8) is None
    assert sliding.kv_format_problem(KVFormat.MODEL) is None


def test_numbers_and_lists_alone_keep_no_reader_busy() -> None:
    """Layers have a bound, and looking for each in a list takes no longer for a long list."""
    with pytest.raises(InvalidModel, match=f"over {LAYERS_MAX}") as caught:
        cache_sizes(PLAIN | {"num_hidden_layers": LAYERS_MAX + 1}, "LlamaForCausalLM")
    assert caught.value.field == "num_hidden_layers"

    values: dict[str, Any] = {
        **PLAIN, "num_hidden_layers": LAYERS_MAX, "intermediate_size": 96,
        "moe_intermediate_size": 8, "num_experts_per_tok": 2,
        "mlp_only_layers": [*range(LAYERS_MAX, 200_000), 0, "x", [1]],
    }  # fmt: skip
    begin_s = time.thread_time()
    assert feed_width(values, "Qwen3MoeForCausalLM") >= 96
    assert time.thread_time() - begin_s < 1.0
