"""Qwen2 and Qwen2.5: a Llama with biased queries, keys and values, and a window in later layers.

Layers from `max_window_layers` on slide where `use_sliding_window` says so; `layer_types`, where it
is there, names them instead.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig, parse_decoder
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.windows import qwen_windows


def parse_qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `Qwen2ForCausalLM`."""
    fields = Fields(config)
    fields.demand("use_mrope", only=False)
    fields.demand("attention_bias", only=True)
    parsed = parse_decoder(fields)
    windows = qwen_windows(fields, layers=parsed.layers, context_max=parsed.context_max)
    return replace(parsed, qkv_bias=True, output_bias=False, windows=windows)


QWEN2: Final = llama_family(parse_qwen2, "qwen2")
