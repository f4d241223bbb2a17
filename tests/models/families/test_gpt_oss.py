"""config.json of a gpt-oss: every key is taken, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_models.families.gpt_oss import parse_gpt_oss
from mlxd_shared.domain.errors import InvalidModel
from tests.worker.kin import GPT_OSS, change

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads of no width": ({"head_dim": None}, "head_dim"),
    "heads of keys unsaid": ({"num_key_value_heads": None}, "num_key_value_heads"),
    "scaling unsaid": ({"rope_scaling": None}, "rope_scaling"),
    "base unsaid": ({"rope_theta": None}, "rope_theta"),
    "no window": ({"sliding_window": None}, "sliding_window"),
    "experts unsaid": ({"num_local_experts": None}, "num_local_experts"),
    "more chosen than there are": ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
    "two counts": ({"experts_per_token": 4}, "experts_per_token"),
    "no bound": ({"swiglu_limit": 0}, "swiglu_limit"),
    "no slope": ({"swiglu_alpha": -1.0}, "swiglu_alpha"),
    "other activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "biases elsewhere": ({"mlp_bias": True}, "mlp_bias"),
    "unknown layers": ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """A key that asks for what the model does not do, or contradicts another, is named."""
    changes, field = REFUSED[name]

    with pytest.raises(InvalidModel) as caught:
        parse_gpt_oss(change(GPT_OSS, **changes))

    assert caught.value.field == field
