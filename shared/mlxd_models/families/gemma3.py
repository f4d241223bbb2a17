"""Gemma 3, its text: layers that slide by a pattern, each kind with a rotation of its own.

Invariants:
- Rope scaling holds for the layers that see everything; those that slide rotate plainly, by a base
  of their own.
- Where the text is a part of a model that sees (`sighted.gemma3`), its config and tensors are taken
  out of the whole by `mlxd_models.files.nested_text`.
- Embeddings are multiplied by the root of their width as bfloat16 rounds it, in which the published
  weights were made and mlx-lm multiplies.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common import decoder
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.rope import RopeConfig
from mlxd_models.families.common.rope_fields import check_rope, parse_rope, refuse_longrope
from mlxd_models.families.common.windows import FULL, SLIDING, named_sliding, windows_of
from mlxd_models.files.nested_text import TEXT_CONFIG, text_config, text_name

PATTERN_DEFAULT: Final = 6
_PATTERN_KEYS: Final = ("sliding_window_pattern", "_sliding_window_pattern")
GLOBAL_BASE_DEFAULT: Final = 1_000_000.0
LOCAL_BASE_DEFAULT: Final = 10_000.0
SCORE_WIDTH_DEFAULT: Final = 256.0
_ACTIVATION_KEYS: Final = ("hidden_activation", "hidden_act")
_ROPE_KEYS: Final = ("rope_scaling", "rope_parameters", "rope_theta")


def parse_gemma3(config: Mapping[str, Any]) -> decoder.DecoderConfig:
    """Return the config of a `Gemma3ForCausalLM`."""
    fields = Fields(config)
    _refuse_unsupported(fields)
    for key, high in (("head_dim", decoder.WIDTH_MAX), ("num_key_value_heads", decoder.HEADS_MAX)):
        # Their defaults do not follow from other sizes, or differ from reader to reader.
        fields.integer(key, low=1, high=high)
    own = {*_ACTIVATION_KEYS, *_ROPE_KEYS}
    common = {key: value for key, value in config.items() if key not in own}
    parsed = decoder.parse_decoder(Fields({"tie_word_embeddings": True, **common}))
    sliding = _sliding_layers(fields, layers=parsed.layers)
    whole, local = _ropes(fields, dims=parsed.head_dim)
    cap = "final_logit_softcapping"
    return replace(
        parsed,
        rope=whole,
        ropes=tuple(local if slides else whole for slides in sliding),
        windows=windows_of(fields, sliding, context_max=parsed.context_max),
        head_norms=True,
        activation=decoder.Activation.GELU_TANH,
        norms_from_one=True,
        output_norms=True,
        embedding_scale=round_to_bfloat16(math.sqrt(parsed.hidden)),
        score_scale=fields.positive("query_pre_attn_scalar", default=SCORE_WIDTH_DEFAULT) ** -0.5,
        logits_cap=fields.positive(cap) if fields.has(cap) else None,
    )


def parse_nested_gemma3(config: Mapping[str, Any]) -> decoder.DecoderConfig:
    """Return the config of the text of a `Gemma3ForConditionalGeneration`."""
    nested = text_config("Gemma3ForConditionalGeneration", config)
    if nested is None:
        raise Fields(config).error(TEXT_CONFIG, "missing, or not an object")
    return parse_gemma3(nested)


def round_to_bfloat16(value: float) -> float:
    """Return the number nearest to a positive one that bfloat16 holds."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(rounded)


def _refuse_unsupported(fields: Fields) -> None:
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        fields.demand(key, only=False)
    if fields.has("attn_logit_softcapping"):
        raise fields.error("attn_logit_softcapping", "capped attention scores are not supported")
    for key in _ACTIVATION_KEYS:
        stated = fields.values.get(key)
        if stated not in (None, decoder.Activation.GELU_TANH.value):
            raise fields.error(key, f"{stated!r} is not supported, only 'gelu_pytorch_tanh'")


def _sliding_layers(fields: Fields, *, layers: int) -> tuple[bool, ...]:
    """Return which layers slide: all but every `sliding_window_pattern`-th, or those named."""
    patterns = [
        fields.integer(key, low=1, high=decoder.LAYERS_MAX)
        for key in _PATTERN_KEYS
        if fields.has(key)
    ]
    pattern = patterns[0] if patterns else PATTERN_DEFAULT
    by_rule = tuple(bool((index + 1) % pattern) for index in range(layers))
    named = named_sliding(fields, layers=layers)
    if named is None:
        return by_rule
    if patterns and named != by_rule:
        raise fields.error("layer_types", f"contradicts {_PATTERN_KEYS[0]} {pattern}")
    return named


def _ropes(fields: Fields, *, dims: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation of layers that see everything, and of those that slide."""
    nested = fields.values.get("rope_parameters")
    if isinstance(nested, Mapping) and (FULL in nested or SLIDING in nested):
        if fields.has("rope_scaling"):
            raise fields.error("rope_scaling", "contradicts rope_parameters by kind of layer")
        parts = [{"rope_parameters": nested.get(kind)} for kind in (FULL, SLIDING)]
    else:
        whole = {key: fields.values.get(key) for key in (*_ROPE_KEYS, "rope_traditional")}
        parts = [whole, {}]
    bases = ("rope_theta", GLOBAL_BASE_DEFAULT), ("rope_local_base_freq", LOCAL_BASE_DEFAULT)
    ropes = []
    for part, (key, default) in zip(parts, bases, strict=True):
        base = fields.positive(key, default=default)
        own = Fields({**part, "rope_theta": base})
        refuse_longrope(own)
        ropes.append(parse_rope(own))
        check_rope(own, ropes[-1], dims=dims)
    return ropes[0], ropes[1]


GEMMA3: Final = llama_family(parse_gemma3, "gemma3_text")
GEMMA3_NESTED: Final = llama_family(parse_nested_gemma3, name_of=text_name)
