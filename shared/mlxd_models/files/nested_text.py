"""Models whose text is a part of more: where it is in config.json, and which tensors are its. Pure.

Tensors of other parts are known by the names that theirs begin with, and left unread; what neither
is the text's nor known is nobody's, and an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

TEXT_CONFIG: Final = "text_config"
OUTER_KEYS: Final = ("quantization", "quantization_config", "tie_word_embeddings", "vocab_size")
"""Keys beside the text's config that apply to it unless it states them itself."""

_HYBRID: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "num_attention_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)
"""Of a Qwen3.5, with experts or without."""

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "LlavaForConditionalGeneration": MappingProxyType({}),  # by the text's kind
        "Qwen2_5_VLForConditionalGeneration": MappingProxyType(
            {
                "vocab_size": 152_064,
                "hidden_size": 8192,
                "intermediate_size": 29_568,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "max_position_embeddings": 32_768,
                "max_window_layers": 80,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
            }
        ),
        "Qwen3VLForConditionalGeneration": MappingProxyType(
            {
                "vocab_size": 151_936,
                "hidden_size": 4096,
                "intermediate_size": 22_016,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "head_dim": 128,
                "max_position_embeddings": 128_000,
                "rope_theta": 5e5,
            }
        ),
        "Qwen3VLMoeForConditionalGeneration": MappingProxyType(
            {
                "vocab_size": 151_936,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "max_position_embeddings": 128_000,
                "moe_intermediate_size": 1408,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "rope_theta": 5e5,
            }
        ),
        "Qwen3_5ForConditionalGeneration": MappingProxyType(
            {
                **_HYBRID,
                "vocab_size": 248_320,
                "hidden_size": 4096,
                "intermediate_size": 12_288,
                "num_hidden_layers": 32,
                "num_key_value_heads": 4,
            }
        ),
        "Qwen3_5MoeForConditionalGeneration": MappingProxyType(
            {
                **_HYBRID,
                "vocab_size": 248_320,
                "hidden_size": 2048,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
            }
        ),
        "Gemma3ForConditionalGeneration": MappingProxyType(
            {
                "vocab_size": 262_208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131_072,
            }
        ),
    }
)
"""What published configs leave out of the text's part."""

_TEXT = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""What names of the text's tensors begin with, and what they would without the rest."""

_OTHER = tuple(
    before + part
    for before in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.")
)


def text_name(name: str) -> str | None:
    """Return a tensor's name, or a module's, within the text; None where it is another part's."""
    if name.startswith(_OTHER):
        return None
    for before, own in _TEXT:
        if name.startswith(before):
            return own + name.removeprefix(before)
    return name


def text_config(architecture: str, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the text's config as if it stood alone; None where there is none.

    Settings of single packed weights are given by the names within the text.
    """
    nested = values.get(TEXT_CONFIG)
    if not isinstance(nested, Mapping):
        return None
    outer = {key: values[key] for key in OUTER_KEYS if values.get(key) is not None}
    stated = {key: value for key, value in nested.items() if value is not None}
    config = {**DEFAULTS[architecture], **outer, **stated}
    for key in ("quantization", "quantization_config"):
        packed = config.get(key)
        if isinstance(packed, Mapping):
            named = ((text_name(name), setting) for name, setting in packed.items())
            config[key] = {name: setting for name, setting in named if name is not None}
    return config
