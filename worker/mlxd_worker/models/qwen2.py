"""Qwen2 and Qwen2.5: a Llama with biased queries, keys and values, and a window in later layers.

Invariants:
- Only the reading of config.json is Qwen2's own; weights and arithmetic are the Llama file's.
- Layers from `max_window_layers` on slide where `use_sliding_window` says so; `layer_types`, where
  it is given, names them instead.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxd_worker.models.architecture import Architecture
from mlxd_worker.models.config import LAYERS_MAX, DecoderConfig, parse_decoder
from mlxd_worker.models.fields import Fields
from mlxd_worker.models.llama import LlamaModel, llama_footprint, llama_tensors
from mlxd_worker.models.windows import Windows, named_sliding, windows_of

WINDOW_DEFAULT = 4096
WHOLE_LAYERS_DEFAULT = 28


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
    windows = _windows(fields, layers=parsed.layers, context_max=parsed.context_max)
    return replace(parsed, qkv_bias=True, output_bias=False, windows=windows)


def _windows(fields: Fields, *, layers: int, context_max: int) -> Windows:
    allowed = fields.flag("use_sliding_window", default=False)
    whole = fields.integer(
        "max_window_layers", low=0, high=LAYERS_MAX, default=WHOLE_LAYERS_DEFAULT
    )
    sliding = named_sliding(fields, layers=layers)
    if sliding is None:
        sliding = tuple(allowed and index >= whole for index in range(layers))
    if any(sliding) and not allowed:
        raise fields.error("layer_types", "names sliding layers, use_sliding_window is not true")
    return windows_of(fields, sliding, context_max=context_max, default=WINDOW_DEFAULT)


QWEN2 = Architecture(
    parse=parse_qwen2, tensors=llama_tensors, footprint=llama_footprint, build=LlamaModel
)
