"""What a checkpoint with recurrent layers holds, and what the model takes besides its weights.

Invariants:
- The weights of the multi-token head (`mtp.*`) may be there; they are known, and left unread.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlxd_models.families.common.decoder import (
    DecoderConfig,
    attention_specs,
    is_routed,
    layer_prefix,
    layer_specs,
    llama_tensors,
)
from mlxd_models.families.common.family import Family, Footprint, llama_footprint
from mlxd_models.families.common.tensors import TensorSpec, linear_specs, weight_spec
from mlxd_models.families.hybrid.config import DeltaConfig, HybridConfig
from mlxd_models.sizes.cache_sizes import CONVOLVED_VALUES

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
        prefix = layer_prefix(index)
        attention = _attention_tensors(decoder, prefix) if full else ()
        mixer = attention or delta_tensors(config.delta, decoder, prefix + DELTA)
        specs += layer_specs(decoder, prefix, mixer, routed=is_routed(decoder, index))
    return (*specs, *_multi_token_tensors(decoder))


def qwen3_5_footprint(config: HybridConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    decoder, delta = config.decoder, config.delta
    joined = 2 * (decoder.heads + decoder.kv_heads) * decoder.head_dim
    plain = llama_footprint(decoder)
    return replace(
        plain,
        caches=replace(
            plain.caches,
            kv_values_per_token=2 * decoder.kv_heads * decoder.head_dim * sum(config.full),
            recurrent_values_per_row=delta.state_values * config.full.count(False),
            recurrent_layers=config.full.count(False),
        ),
        passes=replace(
            plain.passes,
            projected=max(joined, delta.projected),
            recurrent=CONVOLVED_VALUES * delta.mixed,
        ),
        plain_matrix=0,
    )


def hybrid_family(
    parse: Callable[[Mapping[str, Any]], HybridConfig], model_type: str
) -> Family[HybridConfig]:
    """Return a family whose models are Qwen3.5's by another config."""
    builder = "mlxd_worker.models.families.qwen3_5"
    return Family(builder, parse, qwen3_5_tensors, qwen3_5_footprint, model_type)


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


def _attention_tensors(decoder: DecoderConfig, prefix: str) -> list[TensorSpec]:
    gates = decoder.heads * decoder.head_dim
    return attention_specs(replace(decoder, head_norms=True), prefix, gates=gates)


def _multi_token_tensors(decoder: DecoderConfig) -> tuple[TensorSpec, ...]:
    """Return what a published checkpoint also holds: a layer that drafts the token after next."""
    layer = "mtp.layers.0."
    specs = (
        weight_spec(decoder.packing, "mtp.fc.weight", (decoder.hidden, 2 * decoder.hidden)),
        *(
            TensorSpec(f"mtp.{norm}.weight", (decoder.hidden,))
            for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        ),
        *layer_specs(
            decoder, layer, _attention_tensors(decoder, layer), routed=decoder.experts is not None
        ),
    )
    return tuple(replace(spec, required=False) for spec in specs)
