"""Qwen2 and Qwen2.5: a Llama with biased queries, keys and values, and a window in later layers.

Invariants:
- Only the reading of config.json is Qwen2's own; weights and arithmetic are the Llama file's.
- Layers from `max_window_layers` on slide where `use_sliding_window` says so; `layer_types`, where
  it is given, names them instead.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import (
    LLAMA_BUILDER,
    DecoderConfig,
    llama_tensors,
    parse_decoder,
)
from mlxd_models.families.common.family import Family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.footprint import llama_footprint
from mlxd_models.families.common.windows import qwen_windows


def parse_qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `Qwen2ForCausalLM`.

    Raises:
        InvalidModel: a key is missing, mistyped, out of range or asks for what is not supported.
    """
    fields = Fields(config)
    if fields.flag("use_mrope", default=False):
        raise fields.error("use_mrope", "true is not supported")
    if not fields.flag("attention_bias", default=True):
        raise fields.error("attention_bias", "false is not supported by this architecture")
    parsed = parse_decoder(fields)
    windows = qwen_windows(fields, layers=parsed.layers, context_max=parsed.context_max)
    return replace(parsed, qkv_bias=True, output_bias=False, windows=windows)


QWEN2: Final = Family(
    builder=LLAMA_BUILDER,
    model_type="qwen2",
    parse=parse_qwen2,
    tensors=llama_tensors,
    footprint=llama_footprint,
)
