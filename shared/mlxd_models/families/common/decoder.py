"""A Llama-like decoder: its config, and the tensors of its checkpoints.

Invariants:
- A key that would change the arithmetic is honoured or refused by name; it is never ignored.
- Every size is checked for type and range here, so that nothing after this guesses: all else, such
  as names and shapes of tensors, follows from the config.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from mlxd_models.families.common.experts import ExpertsConfig, expert_specs
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.packing import Packings, parse_packing
from mlxd_models.families.common.rope import RopeConfig
from mlxd_models.families.common.rope_fields import check_rope, parse_rope
from mlxd_models.families.common.tensors import TensorSpec, linear_specs, weight_spec
from mlxd_models.families.common.windows import Windows
from mlxd_models.sizes.weight_forms import LAYER_PREFIX
from mlxd_shared.config import CONTEXT_LENGTH_LIMIT, CONTEXT_LENGTH_MIN

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
SINKS = "self_attn.sinks"
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GATED = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"

LAYERS_MAX = 1024
HEADS_MAX = 4096
WIDTH_MAX = 1 << 20
VOCAB_MAX = 1 << 22


class Activation(StrEnum):
    """What gates a layer's values."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a Llama-like decoder: gated products, grouped attention, rotary, RMS norms."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context_max: int
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: Windows
    """One entry a layer."""
    packing: Packings | None = None
    """How the weights are packed, where they are."""
    head_norms: bool = False
    """Whether each head's queries and keys are normalised before they rotate."""
    experts: ExpertsConfig | None = None
    activation: Activation = Activation.SILU
    norms_from_one: bool = False
    """Whether norms are stored as their distance from one."""
    output_norms: bool = False
    """Whether what a layer's two halves make is normalised before it is added."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by: a number that bfloat16 holds."""
    score_scale: float | None = None
    """What products of queries and keys are multiplied by; None: by the head's width."""
    ropes: tuple[RopeConfig, ...] | None = None
    """One entry a layer, where they differ."""
    sinks: bool = False
    """Whether each head has a score of its own that takes a share of its attention."""
    logits_cap: float | None = None
    """Logits are bent so that they stay within this, on both sides."""

    @property
    def feed_width(self) -> int:
        """The widest inner part of a feed-forward, for one position."""
        if self.experts is None:
            return self.mlp
        routed = self.experts.feed_width(self.hidden)
        return routed if all(self.experts.layers) else max(self.mlp, routed)

    def within(self, context: int) -> "DecoderConfig":
        """Return the config of a model no row of which is ever longer than `context`."""
        ropes = None if self.ropes is None else tuple(its.within(context) for its in self.ropes)
        return replace(self, rope=self.rope.within(context), ropes=ropes)

    def rope_of(self, layer: int) -> RopeConfig:
        """Return how a layer rotates."""
        return self.rope if self.ropes is None else self.ropes[layer]

    @property
    def scale(self) -> float:
        """What scores are multiplied by, but for a rotation's own gain."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale


def parse_decoder(fields: Fields) -> DecoderConfig:
    """Return what the families of decoders have in common, without windows; raises as they do."""
    fields.demand("hidden_act", Activation.SILU.value)
    fields.demand("rope_interleaved", only=False)
    partial = fields.positive("partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise fields.error("partial_rotary_factor", f"{partial} is not supported, only 1")
    hidden = fields.integer("hidden_size", low=1, high=WIDTH_MAX)
    layers = fields.integer("num_hidden_layers", low=1, high=LAYERS_MAX)
    heads = fields.integer("num_attention_heads", low=1, high=HEADS_MAX)
    kv_heads = fields.integer("num_key_value_heads", low=1, high=heads, default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    context_max = fields.integer(
        "max_position_embeddings", low=CONTEXT_LENGTH_MIN, high=CONTEXT_LENGTH_LIMIT
    )
    biased = fields.flag("attention_bias", default=False)
    head_dim, rope = _head_dim(fields, hidden, heads), parse_rope(fields)
    check_rope(fields, rope, dims=head_dim)
    return DecoderConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=fields.integer("intermediate_size", low=1, high=WIDTH_MAX),
        vocab=fields.integer("vocab_size", low=1, high=VOCAB_MAX),
        context_max=context_max,
        norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        rope=rope,
        tied_head=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.flag("mlp_bias", default=False),
        windows=(None,) * layers,
        packing=parse_packing(fields),
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if not fields.has("head_dim") and hidden % heads:
        raise fields.error("head_dim", f"missing, and {heads} heads do not divide {hidden}")
    head_dim = fields.integer("head_dim", low=2, high=WIDTH_MAX, default=hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, rotary pairs need an even number")
    return head_dim


class LayerNorms(NamedTuple):
    """The names of a layer's norms over whole rows."""

    attention: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    attention_output: str | None = None
    mlp_output: str | None = None


def norms_of(config: DecoderConfig) -> LayerNorms:
    """Return a layer's norms: one name means something else where outputs are normalised too."""
    if not config.output_norms:
        return LayerNorms()
    before, after = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    return LayerNorms("input_layernorm", before, "post_attention_layernorm", after)


def llama_tensors(config: DecoderConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    hidden = config.hidden
    head = weight_spec(
        config.packing,
        HEAD,
        (config.vocab, hidden),
        required=not config.tied_head,
        copy_of=EMBEDDING if config.tied_head else None,
    )
    embedding = weight_spec(config.packing, EMBEDDING, (config.vocab, hidden))
    specs = [embedding, TensorSpec(FINAL_NORM, (hidden,)), head]
    for index in range(config.layers):
        prefix = layer_prefix(index)
        attention = attention_specs(config, prefix)
        specs += layer_specs(config, prefix, attention, routed=is_routed(config, index))
        specs.append(table_spec(config, prefix))
    return tuple(specs)


def table_spec(config: DecoderConfig, prefix: str) -> TensorSpec:
    """Return a layer's rotary table: old checkpoints store it; it follows from the config."""
    name = f"{prefix}self_attn.rotary_emb.inv_freq"
    return TensorSpec(name, (config.head_dim // 2,), required=False)


def is_routed(config: DecoderConfig, index: int) -> bool:
    """Tell whether a layer has experts."""
    return config.experts is not None and config.experts.layers[index]


def layer_specs(
    config: DecoderConfig, prefix: str, mixer: Iterable[TensorSpec], *, routed: bool
) -> list[TensorSpec]:
    """Return a layer's tensors: norms, `mixer`, and a feed-forward, of experts if `routed`."""
    hidden, mlp, biased = config.hidden, config.mlp, config.mlp_bias
    specs = [TensorSpec(f"{prefix}{norm}.weight", (hidden,)) for norm in norms_of(config) if norm]
    specs += mixer
    if routed and config.experts is not None:
        return specs + expert_specs(config.experts, prefix, hidden=hidden, packings=config.packing)
    shapes = dict.fromkeys(GATED, (mlp, hidden, biased)) | {DOWN: (hidden, mlp, biased)}
    return specs + linear_specs(config.packing, prefix, shapes, joined=GATED)


def attention_specs(config: DecoderConfig, prefix: str, *, gates: int = 0) -> list[TensorSpec]:
    """Return attention's tensors; `gates` more outputs are stored among the queries."""
    hidden, queries = config.hidden, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (queries + gates, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
    }
    specs = linear_specs(config.packing, prefix, shapes, joined=ATTENTION)
    if config.sinks:
        specs.append(TensorSpec(prefix + SINKS, (config.heads,)))
    if config.head_norms:
        specs += [TensorSpec(f"{prefix}{name}.weight", (config.head_dim,)) for name in HEAD_NORMS]
    return specs


def layer_prefix(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{LAYER_PREFIX}{index}."
