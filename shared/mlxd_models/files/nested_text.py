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
