"""config.json of a Llama-like decoder: what is understood is taken, what is not is refused.

Invariants:
- A key that would change the arithmetic is honoured or refused by name; it is never ignored.
- Every size is checked for type and range here, so that nothing after this guesses.
- No arrays and no MLX: the same facts serve the fit before any weight is read.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from mlxd_models.families.common.experts import ExpertsConfig
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.packing import Packings, parse_packing
from mlxd_models.families.common.rope import RopeConfig
from mlxd_models.families.common.rope_fields import check_rope, parse_rope
from mlxd_models.families.common.windows import Windows
from mlxd_shared.config import CONTEXT_LENGTH_LIMIT, CONTEXT_LENGTH_MIN

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
    """Return what the families of decoders have in common; without windows.

    Raises:
        InvalidModel: a key is missing, mistyped, out of range or asks for what is not supported.
    """
    _refuse_unsupported(fields)
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


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported, only 'silu'")
    if fields.flag("rope_interleaved", default=False):
        raise fields.error("rope_interleaved", "true is not supported")
    partial = fields.positive("partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise fields.error("partial_rotary_factor", f"{partial} is not supported, only 1")
