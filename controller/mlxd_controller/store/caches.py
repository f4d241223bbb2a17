"""What each layer of a model remembers, from config.json alone.

Invariants:
- Layers are named one by one (`layer_types`), or by a rule of their architecture; one that neither
  makes known counts as one that remembers every position.
- A window that is no shorter than the context never slides: such a layer counts as a whole one.
"""

from __future__ import annotations

from mlxd_controller.store.fields import Values, count, invalid, layer_count, size
from mlxd_models.sizes.cache_sizes import CONVOLVED_VALUES, CacheSizes, WindowedLayers
from mlxd_models.sizes.pass_sizes import latent_width, routed_width

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"

QWEN_WINDOW_DEFAULT = 4096
QWEN_WHOLE_LAYERS_DEFAULT = 28
QWEN3_5_FULL_INTERVAL_DEFAULT = 4
GEMMA3_PATTERN_DEFAULT = 6

LATENT = {"DeepseekV2ForCausalLM": 0, "DeepseekV3ForCausalLM": 0, "Glm4MoeLiteForCausalLM": 1}
"""Architectures that keep latents, and how many layers are dense where the config does not say."""

EXPERTS = frozenset(
    {*LATENT, "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"}
)
"""Architectures with layers of experts."""

_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


def cache_sizes(values: Values, architecture: str) -> CacheSizes:
    """Return the sizes by kind.

    Raises:
        InvalidModel: a key that they follow from is missing, mistyped or out of range.
    """
    if architecture in LATENT:
        entry = _entry_dim(values)
        layers = layer_count(values)
        return CacheSizes(
            kv_values_per_token=entry * layers, kv_heads=1, head_dim=entry, latent=True
        )
    kinds = _kinds(values, architecture)
    kv_heads = size(values, "num_key_value_heads", default=_heads(values))
    per_layer = 2 * kv_heads * head_dim(values)
    windows: tuple[WindowedLayers, ...] = ()
    if kinds.count(SLIDING):
        window = _window(values, architecture)
        windows = (WindowedLayers(window, per_layer * kinds.count(SLIDING)),)
    recurrent = kinds.count(LINEAR)
    return CacheSizes(
        kv_values_per_token=per_layer * kinds.count(FULL),
        kv_heads=kv_heads,
        head_dim=head_dim(values),
        windows=windows,
        recurrent_values_per_row=recurrent * _linear_state_values(values) if recurrent else 0,
        recurrent_layers=recurrent,
    )


def projected_values(values: Values, architecture: str) -> int:
    """Return what the widest layer projects one position to: queries, keys, values and gates."""
    heads = _heads(values)
    if architecture in LATENT:
        rank, rotary = size(values, "kv_lora_rank"), size(values, "qk_rope_head_dim")
        return latent_width(heads=heads, rank=rank, rotary=rotary)
    kv_heads = size(values, "num_key_value_heads", default=heads)
    if LINEAR not in _kinds(values, architecture):
        return (heads + 2 * kv_heads) * head_dim(values)
    # Where layers alternate, the attention's output is gated by as many values as it has.
    attention = (2 * heads + 2 * kv_heads) * head_dim(values)
    return max(attention, sum(_linear_widths(values)))


def recurrent_values(values: Values, architecture: str) -> int:
    """Return what a recurrent layer makes of what it projects a position to; 0 without one."""
    if architecture in LATENT or LINEAR not in _kinds(values, architecture):
        return 0
    mixed, _ = _linear_widths(values)
    return CONVOLVED_VALUES * mixed


def feed_width(values: Values, architecture: str) -> int:
    """Return the widest inner part of a feed-forward, for one position."""
    if architecture == "GptOssForCausalLM":
        chosen, inner = size(values, "num_experts_per_tok"), size(values, "intermediate_size")
        return routed_width(chosen, size(values, "hidden_size"), inner)
    if architecture not in EXPERTS:
        return size(values, "intermediate_size")
    sparse = _sparse_layers(values, architecture)
    widths = [] if all(sparse) else [size(values, "intermediate_size")]
    if any(sparse):
        chosen, inner = size(values, "num_experts_per_tok"), size(values, "moe_intermediate_size")
        routed = routed_width(chosen, size(values, "hidden_size"), inner)
        widths.append(routed + _shared_width(values, inner))
    return max(widths)


def _shared_width(values: Values, inner: int) -> int:
    """Return the width of what every token goes through beside its experts; 0 without that."""
    beside = inner * count(values, "n_shared_experts", default=0)
    return max(beside, count(values, "shared_expert_intermediate_size", default=0))


def _sparse_layers(values: Values, architecture: str) -> list[bool]:
    """Return which layers have experts."""
    layers = range(layer_count(values))
    if architecture in LATENT:
        kinds = values.get("mlp_layer_types")
        if isinstance(kinds, list) and len(kinds) == len(layers):
            return [kind == "sparse" for kind in kinds]
        first = count(values, "first_k_dense_replace", default=LATENT[architecture])
        return [index >= first for index in layers]
    step = size(values, "decoder_sparse_step", default=1)
    dense = values.get("mlp_only_layers")
    if dense is None:
        dense = []
    if not isinstance(dense, list):
        raise invalid("mlp_only_layers", f"{dense!r} is not a list")
    without = {index for index in dense if type(index) is int}
    return [(index + 1) % step == 0 and index not in without for index in layers]


def _entry_dim(values: Values) -> int:
    """Return the width of what a layer of latents keeps of a position."""
    return size(values, "kv_lora_rank") + size(values, "qk_rope_head_dim")


def head_dim(values: Values) -> int:
    """Return the width of one head."""
    hidden = size(values, "hidden_size")
    return size(values, "head_dim", default=max(1, hidden // _heads(values)))


def _heads(values: Values) -> int:
    return size(values, "num_attention_heads")


def _kinds(values: Values, architecture: str) -> list[str]:
    """Return what each layer is; a window that never slides makes it a whole one."""
    named = values.get("layer_types")
    layers = layer_count(values)
    kinds = _by_rule(values, architecture, layers) if named is None else _named(named, layers)
    if SLIDING in kinds and _window(values, architecture) >= _context_max(values):
        return [FULL if kind == SLIDING else kind for kind in kinds]
    return kinds


def _named(named: object, layers: int) -> list[str]:
    if not isinstance(named, list):
        raise invalid("layer_types", f"{named!r} is not a list")
    if len(named) != layers:
        raise invalid("layer_types", f"names {len(named)} layers, num_hidden_layers is {layers}")
    return [kind if kind in (SLIDING, LINEAR) else FULL for kind in named]


def _by_rule(values: Values, architecture: str, layers: int) -> list[str]:
    match architecture:
        case "MistralForCausalLM" if values.get("sliding_window") is not None:
            return [SLIDING] * layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" if values.get("use_sliding_window") is True:
            whole = count(values, "max_window_layers", default=QWEN_WHOLE_LAYERS_DEFAULT)
            return [FULL if index < whole else SLIDING for index in range(layers)]
        case "GptOssForCausalLM":
            return [FULL if index % 2 else SLIDING for index in range(layers)]
        case "Gemma3ForCausalLM":
            older = size(values, "_sliding_window_pattern", default=GEMMA3_PATTERN_DEFAULT)
            pattern = size(values, "sliding_window_pattern", default=older)
            return [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]
        case "Qwen3_5ForCausalLM" | "Qwen3NextForCausalLM" | "Qwen3_5MoeForCausalLM":
            interval = size(
                values, "full_attention_interval", default=QWEN3_5_FULL_INTERVAL_DEFAULT
            )
            return [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
        case _:
            return [FULL] * layers


def _window(values: Values, architecture: str) -> int:
    default = QWEN_WINDOW_DEFAULT if architecture in _QWEN else None
    return size(values, "sliding_window", default=default)


def _context_max(values: Values) -> int:
    return size(values, "max_position_embeddings")


def _linear_state_values(values: Values) -> int:
    """Return what a layer keeps: its recurrence, and the last inputs of its convolution."""
    heads = size(values, "linear_num_value_heads")
    head = size(values, "linear_key_head_dim") * size(values, "linear_value_head_dim")
    mixed, _ = _linear_widths(values)
    return heads * head + (size(values, "linear_conv_kernel_dim") - 1) * mixed


def _linear_widths(values: Values) -> tuple[int, int]:
    """Return what goes through the convolution, and what gates its result."""
    keys = size(values, "linear_num_key_heads") * size(values, "linear_key_head_dim")
    heads = size(values, "linear_num_value_heads")
    value_width = heads * size(values, "linear_value_head_dim")
    return 2 * keys + value_width, value_width + 2 * heads
