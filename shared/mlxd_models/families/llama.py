"""Llama 2 and 3, SmolLM and their kin: what all Llama-like decoders have in common, and no more."""

from collections.abc import Mapping
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig, parse_decoder
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.windows import refuse_sliding


def parse_llama(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `LlamaForCausalLM` (Llama 2 and 3, SmolLM and their kin)."""
    fields = Fields(config)
    parsed = parse_decoder(fields)
    refuse_sliding(fields, layers=parsed.layers)
    return parsed


LLAMA: Final = llama_family(parse_llama, "llama")
