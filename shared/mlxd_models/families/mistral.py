"""Mistral: a Llama with a window, over all layers or over those that `layer_types` names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig, parse_decoder
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.windows import mistral_windows


def parse_mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `MistralForCausalLM`: Llama's, with a window."""
    fields = Fields(config)
    parsed = parse_decoder(fields)
    windows = mistral_windows(fields, layers=parsed.layers, context_max=parsed.context_max)
    return replace(parsed, windows=windows)


MISTRAL: Final = llama_family(parse_mistral, "mistral")
