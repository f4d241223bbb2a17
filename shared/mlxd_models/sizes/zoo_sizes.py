"""Sizes of a model that mlx-lm serves, from the usual names of config.json. Pure.

Invariants:
- Architectures name the same thing in several ways: the first name that is there counts, and a
  config of text within one that sees is read before what is around it. What a config leaves out is
  what mlx-lm takes then, from a table that was read off its sources (`DEFAULTS_FILE`).
- What cannot be known from names alone is taken for the most that it may be: every layer remembers
  every position, in heads as wide as the widest that is named, and each keeps a state besides where
  any layer does. A worker, which has the model itself, reckons with what it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlxd_models.files.nested_text import TEXT_CONFIG
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_models.sizes.pass_sizes import PassSizes, routed_width
from mlxd_models.sizes.zoo_types import zoo_type
from mlxd_shared.config import CONTEXT_LENGTH_LIMIT, CONTEXT_LENGTH_MIN

Config = Mapping[str, Any]

DEFAULTS_FILE: Final = Path(__file__).with_name("zoo_defaults.json")
"""Sizes by type and name where configs leave them out; `tests.worker.zoo_defaults` writes it."""

CONTEXT_DEFAULT_TOKENS: Final = 4096
"""How long a row may be where neither the config nor mlx-lm says."""

SIZE_MAX: Final = 1 << 24
"""No width or number of anything is beyond this."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
_HIDDEN = ("hidden_size", "hidden_dim", "model_dim", "d_model", "n_embd", "dim")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_query_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_HEAD_WIDTHS = (
    "head_dim",
    "global_head_dim",
    "swa_head_dim",
    "v_head_dim",
    "swa_v_head_dim",
    "kv_channels",
    "hidden_size_per_head",
    "index_head_dim",
)
_INNER = (
    "intermediate_size",
    "ffn_hidden_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "hidden_dim_ffn",
    "mlp_hidden_size",
    "ff_intermediate_size",
    "intermediate_size_mlp",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
)
_EXPERT_INNER = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "ffn_hidden_size",
    "intermediate_size",
)
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
    "block_size",
)
_STATE_WIDTHS = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim", "d_state")
_STATE_INNER = ("mamba_d_ssm", "d_inner", "mamba_intermediate_size", "lru_width")
_STATE_PAIRS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("num_heads", "head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
    ("linear_num_key_heads", "linear_key_head_dim"),
)
_KERNELS = (
    "mamba_d_conv",
    "conv_kernel",
    "d_conv",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "conv1d_width",
)
_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
_STATEFUL = (
    *_STATE_WIDTHS,
    *_KERNELS,
    *_STATE_INNER,
    "conv_window",
    "decay_low_rank_dim",
    "layer_group_size",
    "linear_attn_config",
)
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
_EXPANSIONS = ("mamba_expand", "expand")
_ROTARY, _PLAIN, _LATENT = "qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"
_WINDOWED_KV_HEADS = "swa_num_kv_heads"
_VOCAB = ("vocab_size", "num_vocab")

_KERNEL_DEFAULT: Final = 4
_EXPANSION_DEFAULT: Final = 2
_DRAFTED_FACTOR: Final = 2
"""The caches of a layer that has two: its own and an index's, or one of each half."""

_DOUBLE = ("index_topk", "zero_expert_type", "loop_window_size", "index_head_dim")
"""What configs name whose layers have two caches each."""


def zoo_context(config: Config) -> int:
    """Return the most tokens that a row may hold."""
    stated = _first(config, _CONTEXT) or CONTEXT_DEFAULT_TOKENS
    return max(CONTEXT_LENGTH_MIN, min(stated, CONTEXT_LENGTH_LIMIT))


def zoo_pass_sizes(config: Config, *, vocab: int | None = None) -> PassSizes:
    """Return the widths that decide what a pass takes; `vocab` where it is known already."""
    hidden, heads = _hidden_width(config), _heads(config)
    projected = (heads + 2 * _kv_heads(config)) * _head_width(config)
    state = _state_inner(config) if _is_stateful(config) else 0
    return PassSizes(
        hidden=hidden,
        projected=max(projected, 3 * state),
        mlp=_inner(config, hidden),
        heads=heads,
        vocab=vocab or _first(config, _VOCAB) or 1,
        recurrent=8 * state,
    )


def zoo_cache_sizes(config: Config) -> CacheSizes:
    """Return the most that a model's layers may remember of a row."""
    layers = _first(config, _LAYERS) or 1
    heads, width = _kv_heads(config), _head_width(config)
    caches = layers * (_DRAFTED_FACTOR if any(_has(config, key) for key in _DOUBLE) else 1)
    states = _state_values(config) if _is_stateful(config) else 0
    return CacheSizes(
        kv_values_per_token=2 * heads * width * caches,
        kv_heads=heads,
        head_dim=width,
        recurrent_values_per_row=states * layers,
        recurrent_layers=layers if states else 0,
        foreign=True,
    )


def _hidden_width(config: Config) -> int:
    return _first(config, _HIDDEN) or 1


def _heads(config: Config) -> int:
    return _first(config, _HEADS) or 1


def _kv_heads(config: Config) -> int:
    stated = max(_first(config, _KV_HEADS), _number(config, _WINDOWED_KV_HEADS))
    # Some models unpack a latent for every head, whatever else the config states.
    return max(stated, _heads(config)) if _number(config, _ROTARY) or not stated else stated


def _head_width(config: Config) -> int:
    named = [_number(config, key) for key in _HEAD_WIDTHS]
    rotary = _number(config, _ROTARY)
    named.append(_number(config, _PLAIN) + rotary)
    latent = _number(config, _LATENT) + rotary if rotary else 0
    named.append(-(-latent // _kv_heads(config)))  # one for all heads
    return max([*named, -(-_hidden_width(config) // _heads(config))])


def _inner(config: Config, hidden: int) -> int:
    widths = [_number(config, key) for key in _INNER]
    dense = max(widths) or 4 * hidden
    chosen = _first(config, _CHOSEN) or 0
    if not chosen:
        return dense
    expert = _first(config, _EXPERT_INNER) or dense
    shared = expert * max(_number(config, name) for name in _SHARED_EXPERTS)
    return max(dense, routed_width(chosen, hidden, expert) + max(shared, dense))


def _is_stateful(config: Config) -> bool:
    named = str(config.get("model_type"))  # which keeps the last ids
    return "ngram" in named or any(_has(config, key) for key in _STATEFUL)


def _state_inner(config: Config) -> int:
    """Return the widest that a recurrent layer is inside."""
    hidden = _hidden_width(config)
    named = [_number(config, key) for key in _STATE_INNER]
    named += [_number(config, many) * _number(config, wide) for many, wide in _STATE_PAIRS]
    expansion = max(_number(config, name) for name in _EXPANSIONS)
    return max([*named, (expansion or _EXPANSION_DEFAULT) * hidden, _number(config, _INNER[0])])


def _state_values(config: Config) -> int:
    """Return what one recurrent layer may keep of a row."""
    inner = _state_inner(config)
    heads = [_number(config, key) for key in _HEAD_WIDTHS]
    heads += [_number(config, key) for _, key in _STATE_PAIRS]
    depth = max([*(_number(config, key) for key in _STATE_WIDTHS), *heads, _head_width(config)])
    groups = max(1, *(_number(config, key) for key in _GROUPS))
    kernel = max([_KERNEL_DEFAULT, *(_number(config, key) for key in _KERNELS)])
    return inner * depth + kernel * 3 * (inner + 2 * groups * depth)


def _first(config: Config, names: tuple[str, ...]) -> int:
    """Return the first size of these names that is stated; 0 where none is."""
    return next((value for value in (_number(config, name) for name in names) if value), 0)


def _has(config: Config, name: str) -> bool:
    return any(part.get(name) is not None for part in _parts(config))


def _number(config: Config, name: str) -> int:
    """Return a size, the largest of a list for layers; 0 if it is absent or invalid."""
    for part in _parts(config):
        value = part.get(name)
        values = [
            number
            for number in (value if isinstance(value, list) else [value])
            if type(number) is int
        ]
        largest = max(values, default=0)
        if 0 < largest <= SIZE_MAX:
            return largest
    return 0


def _parts(config: Config) -> list[Config]:
    """Return the objects that sizes stand in, what mlx-lm takes where they do not last.

    They are the text's, the whole, and what layers say apart.
    """
    text, linear = config.get(TEXT_CONFIG), config.get("linear_attn_config")
    stated = [part for part in (text, config, linear) if isinstance(part, Mapping)]
    return [*stated, *(_defaults().get(zoo_type(part) or "", {}) for part in stated)]


@functools.cache
def _defaults() -> Mapping[str, Mapping[str, int]]:
    defaults: dict[str, dict[str, int]] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))
    return defaults
