"""config.json of Llama's kin: each family's windows, and what it refuses, by the key."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_models.families.mistral import parse_mistral
from mlxd_models.families.qwen2 import parse_qwen2
from mlxd_models.families.qwen3 import parse_qwen3
from mlxd_models.families.qwen3_moe import parse_qwen3_moe
from mlxd_shared.domain.errors import InvalidModel
from tests.worker.tiny import config_with

FULL, SLIDING = "full_attention", "sliding_attention"

FAMILIES = {
    "mistral": parse_mistral,
    "qwen2": parse_qwen2,
    "qwen3": parse_qwen3,
    "qwen3_moe": parse_qwen3_moe,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int | None, int | None]]] = {
    "mistral without": ("mistral", {}, (None, None)),
    "mistral": ("mistral", {"sliding_window": 1023}, (1023, 1023)),
    "mistral as long as the context": ("mistral", {"sliding_window": 1024}, (None, None)),
    "mistral mixed": (
        "mistral", {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, (None, 8),
    ),
    "mistral whole": ("mistral", {"layer_types": [FULL, FULL]}, (None, None)),
    "mistral whole as the window is long": (
        "mistral", {"layer_types": [FULL, FULL], "sliding_window": 4096}, (None, None),
    ),
    "qwen2 without": ("qwen2", {}, (None, None)),
    "qwen2 not used": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        (None, None),
    ),
    "qwen2 later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        (None, 8),
    ),
    "qwen2 all layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8),
    ),
    "qwen2 by default none of the first 28": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8}, (None, None),
    ),
    "qwen2 named": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL]},
        (8, None),
    ),
    "qwen2 default window": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "max_position_embeddings": 8192},
        (None, 4096),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_each_layer_gets_its_window(name: str) -> None:
    """Which layers slide is the family's rule or the list; a window that cannot act is none."""
    family, changes, windows = WINDOWS[name]

    assert FAMILIES[family](config_with(**changes)).windows == windows


REFUSED_BY_FAMILY: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "mistral named, no window": (
        "mistral", {"layer_types": [SLIDING, FULL]}, "sliding_window", "missing",
    ),
    "mistral window, none named": (
        "mistral", {"layer_types": [FULL, FULL], "sliding_window": 8}, "layer_types", "names no",
    ),
    "mistral window of nothing": ("mistral", {"sliding_window": 0}, "sliding_window", "not in 1.."),
    "mistral window as text": ("mistral", {"sliding_window": "8"}, "sliding_window", "integer"),
    "qwen2 named, not used": (
        "qwen2", {"layer_types": [SLIDING, FULL], "sliding_window": 8}, "layer_types",
        "use_sliding_window is not true",
    ),
    "qwen2 use as number": ("qwen2", {"use_sliding_window": 1}, "use_sliding_window", "true or"),
    "qwen2 whole layers": (
        "qwen2", {"max_window_layers": -1}, "max_window_layers", "not in 0..",
    ),
    "qwen2 without biases": ("qwen2", {"attention_bias": False}, "attention_bias", "false"),
    "qwen2 of pictures": ("qwen2", {"use_mrope": True}, "use_mrope", "not supported"),
    "qwen3 without heads' width": ("qwen3", {}, "head_dim", "missing"),
    "qwen3 with biases": (
        "qwen3", {"head_dim": 8, "attention_bias": True}, "attention_bias", "true",
    ),
    "qwen3 not normalised": (
        "qwen3", {"head_dim": 8, "use_qk_norm": False}, "use_qk_norm", "false",
    ),
    "qwen3 with biases within": ("qwen3", {"head_dim": 8, "mlp_bias": True}, "mlp_bias", "true"),
    "qwen3 with biases, other key": (
        "qwen3", {"head_dim": 8, "qkv_bias": True}, "qkv_bias", "true",
    ),
    "experts unsaid": ("qwen3_moe", {}, "num_experts", "missing"),
    "more experts chosen than there are": (
        "qwen3_moe", {**EXPERTS, "num_experts_per_tok": 5}, "num_experts_per_tok", "not in 1..4",
    ),
    "experts of no width": (
        "qwen3_moe", {**EXPERTS, "moe_intermediate_size": None}, "moe_intermediate_size", "missing",
    ),
    "no step": (
        "qwen3_moe", {**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step", "not in",
    ),
    "dense layers as text": (
        "qwen3_moe", {**EXPERTS, "mlp_only_layers": "0"}, "mlp_only_layers", "not a list",
    ),
    "shares as number": (
        "qwen3_moe", {**EXPERTS, "norm_topk_prob": 1}, "norm_topk_prob", "not true",
    ),
    "a shared expert": (
        "qwen3_moe", {**EXPERTS, "shared_expert_intermediate_size": 8},
        "shared_expert_intermediate_size", "not supported",
    ),
    "experts with windows": (
        "qwen3_moe", {**EXPERTS, "use_sliding_window": True}, "use_sliding_window", "true",
    ),
    "qwen2 rotating in three": (
        "qwen2", {"rope_scaling": {"type": "mrope"}}, "rope_scaling.type", "'mrope'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_BY_FAMILY)
def test_a_familys_wrong_key_is_refused(name: str) -> None:
    """Keys of a family that are wrong, or contradict each other, are refused by name."""
    family, changes, field, words = REFUSED_BY_FAMILY[name]

    with pytest.raises(InvalidModel) as caught:
        FAMILIES[family](config_with(**changes))

    assert caught.value.field == field
    assert words in caught.value.problem


def test_qwen2_has_biases_before_attention_only() -> None:
    """A Qwen2 adds biases to queries, keys and values whatever its config says, and to no more."""
    config = parse_qwen2(config_with(attention_bias=None))

    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)
