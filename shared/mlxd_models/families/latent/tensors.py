"""What a checkpoint of a model that keeps latents holds, and what it takes besides its weights.

Invariants:
- What makes keys and values of latents is stored as published (`kv_b_proj`), or as mlx-lm has it:
  one matrix a head that takes queries to latents, another that takes latents to values.
- The layers that draft tokens (after the last one) may be there; they are known, and left unread.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import (
    is_routed,
    layer_prefix,
    layer_specs,
    llama_tensors,
    table_spec,
)
from mlxd_models.families.common.family import Family, Footprint, llama_footprint
from mlxd_models.families.common.tensors import TensorSpec, linear_specs, weight_spec
from mlxd_models.families.latent.config import LatentConfig
from mlxd_models.sizes.cache_sizes import CacheSizes

QUERY: Final = "self_attn.q_proj"
QUERY_DOWN: Final = "self_attn.q_a_proj"
QUERY_NORM: Final = "self_attn.q_a_layernorm.weight"
QUERY_UP: Final = "self_attn.q_b_proj"
ENTRY_DOWN: Final = "self_attn.kv_a_proj_with_mqa"
LATENT_NORM: Final = "self_attn.kv_a_layernorm.weight"
BOTH_UP: Final = "self_attn.kv_b_proj"
ABSORBING: Final = "self_attn.embed_q"
EXPANDING: Final = "self_attn.unembed_out"
OUTPUT: Final = "self_attn.o_proj"


def latent_tensors(config: LatentConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    decoder = config.decoder
    specs = list(llama_tensors(replace(decoder, layers=0)))
    for index in range(decoder.layers):
        specs += _layer(config, layer_prefix(index), routed=is_routed(decoder, index))
    for index in range(decoder.layers, decoder.layers + config.drafting_layers):
        drafting = (
            *_layer(config, layer_prefix(index), routed=decoder.experts is not None),
            *_drafting(config, layer_prefix(index)),
        )
        specs += [replace(spec, required=False) for spec in drafting]
    return tuple(specs)


def latent_footprint(config: LatentConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    decoder = config.decoder
    plain = llama_footprint(decoder)
    return replace(
        plain,
        caches=CacheSizes(
            kv_values_per_token=config.entry_dim * decoder.layers,
            kv_heads=1,
            head_dim=config.entry_dim,
            latent=True,
        ),
        # Queries become as wide as entries, and read latents; they are there once more with their
        # scale, and so is what they read, in order.
        passes=replace(plain.passes, projected=decoder.heads * config.entry_dim),
        plain_matrix=0,
    )


def latent_family(
    parse: Callable[[Mapping[str, Any]], LatentConfig], model_type: str
) -> Family[LatentConfig]:
    """Return a family whose models keep latents."""
    builder = "mlxd_worker.models.families.latent_model"
    return Family(builder, parse, latent_tensors, latent_footprint, model_type)


def _layer(config: LatentConfig, prefix: str, *, routed: bool) -> list[TensorSpec]:
    specs = layer_specs(config.decoder, prefix, _attention(config, prefix), routed=routed)
    return [*specs, table_spec(config.decoder, prefix)]


def _attention(config: LatentConfig, prefix: str) -> list[TensorSpec]:
    decoder, rank = config.decoder, config.query_rank
    hidden, biased = decoder.hidden, decoder.qkv_bias
    shapes = {
        ENTRY_DOWN: (config.entry_dim, hidden, biased),
        OUTPUT: (hidden, config.values, decoder.output_bias),
    }
    specs = [TensorSpec(f"{prefix}{LATENT_NORM}", (config.rank,)), _both_up(config, prefix)]
    if rank is None:
        shapes[QUERY] = (config.queries, hidden, False)
    else:
        shapes |= {QUERY_DOWN: (rank, hidden, biased), QUERY_UP: (config.queries, rank, False)}
        specs.append(TensorSpec(f"{prefix}{QUERY_NORM}", (rank,)))
    joined = (QUERY, QUERY_DOWN, ENTRY_DOWN)
    return specs + linear_specs(decoder.packing, prefix, shapes, joined=joined)


def _both_up(config: LatentConfig, prefix: str) -> TensorSpec:
    decoder = config.decoder
    heads, plain, value, rank = decoder.heads, config.plain_dim, config.value_dim, config.rank
    shapes = {ABSORBING: (heads, rank, plain), EXPANDING: (heads, value, rank)}
    stem, packings = f"{prefix}{BOTH_UP}", decoder.packing
    whole = weight_spec(packings, f"{stem}.weight", (heads * (plain + value), rank))
    apart = [weight_spec(packings, f"{prefix}{name}.weight", its) for name, its in shapes.items()]
    return replace(whole, instead=(tuple(apart),), joins=stem)


def _drafting(config: LatentConfig, prefix: str) -> tuple[TensorSpec, ...]:
    """Return what a drafting layer has besides: the table and the head once more, and norms."""
    decoder = config.decoder
    hidden, vocab = decoder.hidden, decoder.vocab
    norms = ("enorm", "hnorm", "shared_head.norm")
    return (
        *(TensorSpec(f"{prefix}{norm}.weight", (hidden,)) for norm in norms),
        weight_spec(decoder.packing, f"{prefix}eh_proj.weight", (hidden, 2 * hidden)),
        weight_spec(decoder.packing, f"{prefix}embed_tokens.weight", (vocab, hidden)),
        weight_spec(decoder.packing, f"{prefix}shared_head.head.weight", (vocab, hidden)),
    )
