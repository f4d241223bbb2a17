"""Qwen3: a Llama whose queries and keys are normalised head by head, and without biases.

Invariants:
- Only the reading of config.json is Qwen3's own; weights and arithmetic are the Llama files'.
- Windows are Qwen2's: layers from `max_window_layers` on slide where `use_sliding_window` says so.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import (
    LLAMA_BUILDER,
    WIDTH_MAX,
    DecoderConfig,
    llama_tensors,
    parse_decoder,
)
from mlxd_models.families.common.family import Family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.footprint import llama_footprint
from mlxd_models.families.common.windows import qwen_windows


def parse_qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `Qwen3ForCausalLM`.

    Raises:
        InvalidModel: a key is missing, mistyped, out of range or asks for what is not supported.
    """
    fields = Fields(config)
    # Its default differs from reader to reader, and is not what follows from the other sizes.
    fields.integer("head_dim", low=2, high=WIDTH_MAX)
    parsed = parse_unbiased(fields)
    windows = qwen_windows(fields, layers=parsed.layers, context_max=parsed.context_max)
    return replace(parsed, windows=windows)


def parse_unbiased(fields: Fields) -> DecoderConfig:
    """Return what the Qwen3 families have in common; without windows.

    Raises:
        InvalidModel: as `parse_qwen3`.
    """
    for key, only in (("attention_bias", False), ("qkv_bias", False), ("use_qk_norm", True)):
        if fields.flag(key, default=only) is not only:
            raise fields.error(key, f"{str(not only).lower()} is not supported")
    parsed = parse_decoder(fields)
    if parsed.mlp_bias:
        raise fields.error("mlp_bias", "true is not supported by this architecture")
    return replace(parsed, head_norms=True)


QWEN3: Final = Family(
    builder=LLAMA_BUILDER,
    model_type="qwen3",
    parse=parse_qwen3,
    tensors=llama_tensors,
    footprint=llama_footprint,
)
