"""config.json of models that keep latents: what their families have in common.

A key whose default differs from reader to reader is required.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from mlxd_models.families.common.decoder import (
    HEADS_MAX,
    LAYERS_MAX,
    WIDTH_MAX,
    DecoderConfig,
    parse_decoder,
)
from mlxd_models.families.common.experts import (
    ExpertsConfig,
    GroupsConfig,
    SharedConfig,
    experts_of,
)
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.rope_fields import refuse_longrope

DRAFTING_LAYERS_MAX: Final = 16
SHARED_EXPERTS_MAX: Final = 64
LATENT_NORM_EPS: Final = 1e-6
"""Of the norms within attention, whatever `rms_norm_eps` says."""
_ROPE_KEYS: Final = ("rope_scaling", "rope_parameters")
_OWN_KEYS: Final = frozenset({"head_dim", "num_key_value_heads"})


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The whole model: what it shares with a Llama, and its attention."""

    decoder: DecoderConfig
    """Its heads' width is that of the part that rotates; a layer's keys have one such part."""
    rank: int
    """Width of a latent."""
    query_rank: int | None
    """Width of what queries are made of; None where a row's own values are."""
    plain_dim: int
    """Width of a head's part that does not rotate, as queries have it."""
    value_dim: int
    drafting_layers: int
    """Layers that draft tokens: stored after the others, and left unread."""

    def within(self, context: int) -> "LatentConfig":
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, decoder=self.decoder.within(context))

    @property
    def rotary_dim(self) -> int:
        """Width of a head's part that rotates."""
        return self.decoder.head_dim

    @property
    def query_dim(self) -> int:
        """Width of one head's query before it is compared with latents."""
        return self.plain_dim + self.rotary_dim

    @property
    def entry_dim(self) -> int:
        """Width of what is kept of a position: its latent, and its keys' rotated part."""
        return self.rank + self.rotary_dim

    @property
    def queries(self) -> int:
        """Width of all queries of a position."""
        return self.decoder.heads * self.query_dim

    @property
    def values(self) -> int:
        """Width of what all heads make of a position."""
        return self.decoder.heads * self.value_dim


def parse_latent(fields: Fields) -> LatentConfig:
    """Return what the families have in common; every layer dense."""
    rotary_dim = fields.integer("qk_rope_head_dim", low=2, high=WIDTH_MAX)
    plain_dim = fields.integer("qk_nope_head_dim", low=1, high=WIDTH_MAX)
    if rotary_dim % 2:
        problem = f"{rotary_dim} is odd, rotary pairs need an even number"
        raise fields.error("qk_rope_head_dim", problem)
    refuse_longrope(fields)
    fields.demand("mlp_bias", only=False)
    common = {key: value for key, value in fields.values.items() if key not in _OWN_KEYS}
    decoder = parse_decoder(Fields({**common, "head_dim": rotary_dim}))
    heads = fields.integer("num_key_value_heads", low=1, high=HEADS_MAX, default=decoder.heads)
    if heads != decoder.heads:
        raise fields.error("num_key_value_heads", f"{heads}, there are {decoder.heads} heads")
    query_rank = _query_rank(fields)
    if decoder.qkv_bias and query_rank is None:
        raise fields.error("attention_bias", "true is not supported without q_lora_rank")
    interleaved = fields.flag("rope_interleave", default=True)
    return LatentConfig(
        decoder=replace(
            decoder,
            rope=replace(decoder.rope, interleaved=interleaved),
            score_scale=(plain_dim + rotary_dim) ** -0.5 * _score_gain(fields),
        ),
        rank=fields.integer("kv_lora_rank", low=1, high=WIDTH_MAX),
        query_rank=query_rank,
        plain_dim=plain_dim,
        value_dim=fields.integer("v_head_dim", low=1, high=WIDTH_MAX),
        drafting_layers=fields.integer(
            "num_nextn_predict_layers", low=0, high=DRAFTING_LAYERS_MAX, default=1
        ),
    )


def with_experts(config: LatentConfig, experts: ExpertsConfig) -> LatentConfig:
    """Return the config with experts in those layers that have some."""
    routed = experts if any(experts.layers) else None
    return replace(config, decoder=replace(config.decoder, experts=routed))


def parse_experts(fields: Fields, *, sparse: tuple[bool, ...], normalised: bool) -> ExpertsConfig:
    """Return the layers of experts, shared ones included; without scores, groups and scaling."""
    if fields.integer("moe_layer_freq", low=1, high=LAYERS_MAX, default=1) != 1:
        raise fields.error("moe_layer_freq", "only 1 is supported")
    count = experts_of(fields, "n_routed_experts", layers=len(sparse))
    mlp = fields.integer("moe_intermediate_size", low=1, high=WIDTH_MAX)
    beside = fields.integer("n_shared_experts", low=0, high=SHARED_EXPERTS_MAX, default=0)
    return ExpertsConfig(
        count=count,
        chosen=fields.integer("num_experts_per_tok", low=1, high=count),
        mlp=mlp,
        normalised=normalised,
        layers=sparse,
        shared=SharedConfig(beside * mlp, "shared_experts") if beside else None,
    )


def parse_groups(fields: Fields, experts: ExpertsConfig, *, best: int) -> GroupsConfig | None:
    """Return the groups of experts; None where there is one, or none is left out.

    best: by the sum of how many of its experts a group is judged.
    """
    count = fields.integer("n_group", low=1, high=experts.count)
    kept = fields.integer("topk_group", low=1, high=count)
    if experts.count % count:
        raise fields.error("n_group", f"{count} does not divide {experts.count} experts")
    size = experts.count // count
    if count == kept:
        return None
    if size < best:
        raise fields.error("n_group", f"{count} leaves {size} experts a group, {best} are needed")
    if kept * size < experts.chosen:
        problem = f"{kept} groups hold {kept * size} experts, {experts.chosen} are chosen"
        raise fields.error("topk_group", problem)
    return GroupsConfig(count=count, kept=kept, best=best)


def first_layers_dense(fields: Fields, *, layers: int, default: int | None) -> tuple[bool, ...]:
    """Return which layers have experts: all but the first `first_k_dense_replace`."""
    dense = fields.integer("first_k_dense_replace", low=0, high=LAYERS_MAX, default=default)
    return tuple(index >= dense for index in range(layers))


def _query_rank(fields: Fields) -> int | None:
    if "q_lora_rank" not in fields.values:
        raise fields.error("q_lora_rank", "missing; null means that there is none")
    if not fields.has("q_lora_rank"):
        return None
    return fields.integer("q_lora_rank", low=1, high=WIDTH_MAX)


def _score_gain(fields: Fields) -> float:
    """Return what scores are multiplied by for `mscale_all_dim`."""
    stated = [fields.values[key] for key in _ROPE_KEYS if fields.has(key)]
    scaling: Mapping[str, Any] = next((its for its in stated if isinstance(its, Mapping)), {})
    own = Fields(scaling, "rope_scaling.")
    plain = scaling.get("rope_type", scaling.get("type")) in (None, "default")
    if plain or scaling.get("mscale_all_dim") in (None, 0):
        return 1.0
    factor = own.positive("factor")
    if factor <= 1.0:
        return 1.0
    gain = 1.0 + own.positive("mscale_all_dim") * math.log(factor) / 10
    return gain * gain
