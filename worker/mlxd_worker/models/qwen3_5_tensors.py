"""What a Qwen3.5 checkpoint holds, and what the model takes besides its weights.

Invariants:
- The weights of the multi-token head (`mtp.*`) may be there; they are known, and left unread.
"""

from dataclasses import replace

from mlxd_shared.cache_sizes import CONVOLVED_VALUES, CacheSizes
from mlxd_shared.pass_sizes import PassSizes
from mlxd_worker.models.architecture import Footprint, TensorSpec
from mlxd_worker.models.config import DecoderConfig
from mlxd_worker.models.delta_mixer import delta_tensors
from mlxd_worker.models.llama_tensors import llama_tensors
from mlxd_worker.models.qwen3_5_config import HybridConfig

DELTA = "linear_attn."
"""Where a layer's gated delta tensors are, within the layer."""


def qwen3_5_tensors(config: HybridConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    decoder = config.decoder
    specs = list(llama_tensors(replace(decoder, layers=0)))
    for index, full in enumerate(config.full):
        prefix = f"model.layers.{index}."
        specs += _layer_tensors(decoder, prefix)
        if full:
            specs += _attention_tensors(decoder, prefix)
        else:
            specs += delta_tensors(config.delta, prefix + DELTA, hidden=decoder.hidden)
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
            mlp=decoder.mlp,
            heads=decoder.heads,
            vocab=decoder.vocab,
            recurrent=CONVOLVED_VALUES * delta.mixed,
        ),
    )


def _layer_tensors(decoder: DecoderConfig, prefix: str) -> tuple[TensorSpec, ...]:
    hidden, mlp = decoder.hidden, decoder.mlp
    return (
        TensorSpec(f"{prefix}input_layernorm.weight", (hidden,)),
        TensorSpec(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        TensorSpec(f"{prefix}mlp.gate_proj.weight", (mlp, hidden)),
        TensorSpec(f"{prefix}mlp.up_proj.weight", (mlp, hidden)),
        TensorSpec(f"{prefix}mlp.down_proj.weight", (hidden, mlp)),
    )


def _attention_tensors(decoder: DecoderConfig, prefix: str) -> tuple[TensorSpec, ...]:
    hidden, queries = decoder.hidden, decoder.heads * decoder.head_dim
    keys = decoder.kv_heads * decoder.head_dim
    shapes = {
        "q_proj": (2 * queries, hidden, decoder.qkv_bias),
        "k_proj": (keys, hidden, decoder.qkv_bias),
        "v_proj": (keys, hidden, decoder.qkv_bias),
        "o_proj": (hidden, queries, decoder.output_bias),
    }
    specs = [
        TensorSpec(f"{prefix}self_attn.{norm}.weight", (decoder.head_dim,))
        for norm in ("q_norm", "k_norm")
    ]
    for name, (outputs, inputs, has_bias) in shapes.items():
        specs.append(TensorSpec(f"{prefix}self_attn.{name}.weight", (outputs, inputs)))
        if has_bias:
            specs.append(TensorSpec(f"{prefix}self_attn.{name}.bias", (outputs,)))
    return tuple(specs)


def _multi_token_tensors(decoder: DecoderConfig) -> tuple[TensorSpec, ...]:
    """Return what a published checkpoint also holds: a layer that drafts the token after next."""
    layer = "mtp.layers.0."
    specs = (
        TensorSpec("mtp.fc.weight", (decoder.hidden, 2 * decoder.hidden)),
        *(
            TensorSpec(f"mtp.{norm}.weight", (decoder.hidden,))
            for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        ),
        *_layer_tensors(decoder, layer),
        *_attention_tensors(decoder, layer),
    )
    return tuple(replace(spec, required=False) for spec in specs)
