"""Llama 2 and 3, SmolLM and their kin: what all Llama-like decoders have in common, and no more."""

from collections.abc import Mapping
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
from mlxd_models.families.common.windows import refuse_sliding


def parse_llama(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `LlamaForCausalLM` (Llama 2 and 3, SmolLM and their kin).

    Raises:
        InvalidModel: a key is missing, mistyped, out of range or asks for what is not supported.
    """
    fields = Fields(config)
    parsed = parse_decoder(fields)
    refuse_sliding(fields, layers=parsed.layers)
    return parsed


LLAMA: Final = Family(
    builder=LLAMA_BUILDER,
    model_type="llama",
    parse=parse_llama,
    tensors=llama_tensors,
    footprint=llama_footprint,
)
