"""config.json of a Gemma 3's text: every key is taken, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_models.families.gemma3 import parse_gemma3, parse_nested_gemma3
from mlxd_shared.domain.errors import InvalidModel
from tests.worker.kin import GEMMA3, change

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}


def test_named_layers_and_nested_rotations_are_the_same_model() -> None:
    """`layer_types` and rotations by kind of layer, as transformers 5 writes them, say the same."""
    older = parse_gemma3(change(GEMMA3, rope_scaling=LINEAR))
    newer = parse_gemma3(
        change(
            GEMMA3,
            sliding_window_pattern=None,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            rope_theta=None,
            rope_local_base_freq=None,
            rope_parameters={
                FULL: {**LINEAR, "rope_theta": 100000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
            },
        )
    )

    assert newer == older
    assert [rope.base for rope in older.ropes or ()] == [1000.0, 100000.0] * 2
    assert [rope.position_scale for rope in older.ropes or ()] == [1.0, 0.125] * 2


def test_what_a_nested_config_leaves_out_is_as_published() -> None:
    """The text's part of a real config says few sizes; the others are transformers' defaults."""
    sparse = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    parsed = parse_nested_gemma3({"text_config": sparse})

    assert (parsed.heads, parsed.kv_heads, parsed.head_dim) == (8, 4, 256)
    assert (parsed.vocab, parsed.context_max, parsed.tied_head) == (262_208, 131_072, True)
    assert parsed.windows.count(None) == 5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "capped scores": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "seeing ahead": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "other activation": ({"hidden_activation": "gelu"}, "hidden_activation"),
    "activation, older key": ({"hidden_act": "silu"}, "hidden_act"),
    "heads of no width": ({"head_dim": None}, "head_dim"),
    "heads of keys unsaid": ({"num_key_value_heads": None}, "num_key_value_heads"),
    "no window": ({"sliding_window": None}, "sliding_window"),
    "layers unlike the pattern": ({"layer_types": [FULL] * 4}, "layer_types"),
    "rotations twice": (
        {"rope_scaling": LINEAR, "rope_parameters": {FULL: LINEAR}}, "rope_scaling",
    ),
    "cap of nothing": ({"final_logit_softcapping": 0}, "final_logit_softcapping"),
    "scores by nothing": ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """A key that asks for what the model does not do, or contradicts another, is named."""
    changes, field = REFUSED[name]

    with pytest.raises(InvalidModel) as caught:
        parse_gemma3(change(GEMMA3, **changes))

    assert caught.value.field == field
