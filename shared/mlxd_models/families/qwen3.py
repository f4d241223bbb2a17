"""Qwen3: a Llama whose queries and keys are normalised head by head, and without biases.

Windows are Qwen2's: layers from `max_window_layers` on slide where `use_sliding_window` says so.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import WIDTH_MAX, DecoderConfig, parse_decoder
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.windows import qwen_windows


def parse_qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `Qwen3ForCausalLM`."""
    fields = Fields(config)
    # Its default differs from reader to reader, and is not what follows from the other sizes.
    fields.integer("head_dim", low=2, high=WIDTH_MAX)
    parsed = parse_unbiased(fields)
    windows = qwen_windows(fields, layers=parsed.layers, context_max=parsed.context_max)
    return replace(parsed, windows=windows)


def parse_unbiased(fields: Fields) -> DecoderConfig:
    """Return what the Qwen3 families have in common; without windows."""
    for key in ("attention_bias", "qkv_bias", "mlp_bias"):
        fields.demand(key, only=False)
    fields.demand("use_qk_norm", only=True)
    return replace(parse_decoder(fields), head_norms=True)


QWEN3: Final = llama_family(parse_qwen3, "qwen3")
