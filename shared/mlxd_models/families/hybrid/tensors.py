"""What a checkpoint with recurrent layers holds, and what the model takes besides its weights.

Invariants:
- The weights of the multi-token head (`mtp.*`) may be there; they are known, and left unread.
"""

from dataclasses import replace

from mlxd_models.families.common.decoder import (
    ATTENTION,
    HEAD_NORMS,
    DecoderConfig,
    feed_specs,
    is_routed,
    llama_tensors,
)
from mlxd_models.families.common.footprint import Footprint
from mlxd_models.families.common.tensors import TensorSpec, linear_specs, weight_spec
from mlxd_models.families.hybrid.config import DeltaConfig, HybridConfig
from mlxd_models.sizes.cache_sizes import CONVOLVED_VALUES, CacheSizes
from mlxd_models.sizes.pass_sizes import PassSizes

HYBRID_BUILDER = "mlxd_worker.models.families.qwen3_5"

DELTA = "linear_attn."
"""Where a layer's gated delta tensors are, within the layer."""

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
GROUPED_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba")
DELTA_OUTPUT = "out_proj"


def qwen3_5_tensors(config: HybridConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    decoder = config.decoder
    specs = list(llama_tensors(replace(decoder, layers=0)))
    for index, full in enumerate(config.full):
        prefix = f"model.layers.{index}."
        specs += _layer_tensors(decoder, prefix, routed=is_routed(decoder, index))
        if full:
            specs += _attention_tensors(decoder, prefix)
        else:
            specs += delta_tensors(config.delta, decoder, prefix + DELTA)
    return (*specs, *_multi_token_tensors(decoder))


def qwen3_5_footprint(config: HybridConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    decoder, delta = config.decoder, config.delta
    joined = 2 * (decoder.heads + decoder.kv_heads) * decoder.head_dim
    return Footprint(
        context_max=decoder.context_max,
        caches=CacheSizes(
            kv_values_per_token=2 * decoder.kv_heads * decoder.head_dim * sum(config.full),
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            recurrent_values_per_row=delta.state_values * config.full.count(False),
            recurrent_layers=config.full.count(False),
        ),
        passes=PassSizes(
            hidden=decoder.hidden,
            projected=max(joined, delta.projected),
            mlp=decoder.feed_width,
            heads=decoder.heads,
            vocab=decoder.vocab,
            recurrent=CONVOLVED_VALUES * delta.mixed,
        ),
    )


def delta_tensors(
    config: DeltaConfig, decoder: DecoderConfig, prefix: str
) -> tuple[TensorSpec, ...]:
    """Return one layer's tensors."""
    heads = config.value_heads
    names: tuple[str, ...] = PROJECTIONS
    outputs: tuple[int, ...] = (config.mixed, config.values, heads, heads)
    if config.grouped:
        names, outputs = GROUPED_PROJECTIONS, (config.mixed + config.values, 2 * heads)
    linears = {
        name: (width, decoder.hidden, False) for name, width in zip(names, outputs, strict=True)
    }
    linears[DELTA_OUTPUT] = (decoder.hidden, config.values, False)
    convolution = TensorSpec(
        f"{prefix}conv1d.weight",
        (config.mixed, 1, config.kernel),
        other_shape=(config.mixed, config.kernel, 1),
        exact=True,
    )
    return (
        convolution,
        *linear_specs(decoder.packing, prefix, linears, joined=names),
        *(TensorSpec(prefix + name, (heads,), exact=True) for name in ("A_log", "dt_bias")),
        TensorSpec(f"{prefix}norm.weight", (config.value_dim,)),
    )


def _layer_tensors(decoder: DecoderConfig, prefix: str, *, routed: bool) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{prefix}input_layernorm.weight", (decoder.hidden,)),
        TensorSpec(f"{prefix}post_attention_layernorm.weight", (decoder.hidden,)),
        *feed_specs(decoder, prefix, routed=routed),
    )


def _attention_tensors(decoder: DecoderConfig, prefix: str) -> tuple[TensorSpec, ...]:
    hidden, queries = decoder.hidden, decoder.heads * decoder.head_dim
    keys = decoder.kv_heads * decoder.head_dim
    shapes = {
        "self_attn.q_proj": (2 * queries, hidden, decoder.qkv_bias),
        "self_attn.k_proj": (keys, hidden, decoder.qkv_bias),
        "self_attn.v_proj": (keys, hidden, decoder.qkv_bias),
        "self_attn.o_proj": (hidden, queries, decoder.output_bias),
    }
    norms = [TensorSpec(f"{prefix}{name}.weight", (decoder.head_dim,)) for name in HEAD_NORMS]
    return (*norms, *linear_specs(decoder.packing, prefix, shapes, joined=ATTENTION))


def _multi_token_tensors(decoder: DecoderConfig) -> tuple[TensorSpec, ...]:
    """Return what a published checkpoint also holds: a layer that drafts the token after next."""
    layer = "mtp.layers.0."
    specs = (
        weight_spec(decoder.packing, "mtp.fc.weight", (decoder.hidden, 2 * decoder.hidden)),
        *(
            TensorSpec(f"mtp.{norm}.weight", (decoder.hidden,))
            for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        ),
        *_layer_tensors(decoder, layer, routed=decoder.experts is not None),
        *_attention_tensors(decoder, layer),
    )
    return tuple(replace(spec, required=False) for spec in specs)
