"""config.json into a frozen, typed config: what is understood is taken, what is not is refused.

Invariants:
- A key that would change the arithmetic is honoured or refused by name; it is never ignored.
- Every size is checked for type and range here, so that nothing after this guesses.
- No arrays and no MLX: the same facts serve the fit before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mlxd_shared.config import CONTEXT_LENGTH_LIMIT, CONTEXT_LENGTH_MIN
from mlxd_shared.expert_sizes import routed_width
from mlxd_shared.model_config import read_model_config
from mlxd_shared.model_source import Source
from mlxd_worker.models.fields import Fields, invalid
from mlxd_worker.models.layers.rope import RopeConfig, check_rope, parse_rope
from mlxd_worker.models.layers.windows import Windows, mistral_windows, refuse_sliding
from mlxd_worker.models.weights.packing import Packings, parse_packing

LAYERS_MAX = 1024
HEADS_MAX = 4096
WIDTH_MAX = 1 << 20
VOCAB_MAX = 1 << 22


def read_config(source: Source) -> Mapping[str, Any]:
    """Return the parsed config.json of a model.

    Raises:
        InvalidModel: missing, unreadable, over its bound, not JSON, or not an object.
    """
    return read_model_config(source)


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return `architectures[0]`.

    Raises:
        InvalidModel: the key is absent, empty or not a list of names.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise invalid("architectures", f"{names!r} is not a list that starts with a name")
    return names[0]


class Activation(StrEnum):
    """What gates a layer's values."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class Scoring(StrEnum):
    """What makes shares of how much a router wants its experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    """Experts in groups, of which a token goes to the best alone."""

    count: int
    kept: int
    """How many groups a token's experts are chosen from."""
    best: int
    """A group is worth the sum of so many of its best experts."""


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """A network beside the experts, which every token goes through."""

    mlp: int
    name: str
    """Of its module, in names of tensors."""
    gated: bool = False
    """Whether each token has a gate for what it makes."""


@dataclass(frozen=True, slots=True)
class GateClamp:
    """A gate bounded above, and what it gates bounded on both sides, one more of that going in."""

    limit: float
    slope: float
    """What the gate is multiplied by within its sigmoid."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers that choose a few of many small networks for each token."""

    count: int
    chosen: int
    """How many a token goes through."""
    mlp: int
    """The inner width of one."""
    normalised: bool
    """Whether the chosen ones' weights are made to sum to one."""
    layers: tuple[bool, ...]
    """Which layers do; the others are dense."""
    clamp: GateClamp | None = None
    """How their gates differ from a layer's own activation."""
    biased: bool = False
    """Whether experts and router have biases."""
    router: str = "mlp.gate"
    """The router's name within a layer."""
    stack: str = "mlp.switch_mlp"
    """What the names of all experts' linears begin with within a layer."""
    scoring: Scoring = Scoring.SOFTMAX
    groups: GroupsConfig | None = None
    corrected: bool = False
    """Whether a stored number for each expert is added to its share for the choice alone."""
    scaling: float = 1.0
    """What the chosen ones' weights are multiplied by in the end."""
    shared: SharedConfig | None = None
    fused: bool = False
    """Whether checkpoints may store gates and ups of all experts in one tensor."""

    def feed_width(self, hidden: int) -> int:
        """Return the widest inner part of such a layer, for one position."""
        routed = routed_width(self.chosen, hidden, self.mlp)
        return routed if self.shared is None else routed + self.shared.mlp


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


def parse_llama(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `LlamaForCausalLM` (Llama 2 and 3, SmolLM and their kin).

    Raises:
        InvalidModel: a key is missing, mistyped, out of range or asks for what is not supported.
    """
    fields = Fields(config)
    parsed = parse_decoder(fields)
    refuse_sliding(fields, layers=parsed.layers)
    return parsed


def parse_mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `MistralForCausalLM`: Llama's, with a window.

    Raises:
        InvalidModel: as `parse_llama`; or `layer_types` and `sliding_window` contradict each other.
    """
    fields = Fields(config)
    parsed = parse_decoder(fields)
    windows = mistral_windows(fields, layers=parsed.layers, context_max=parsed.context_max)
    return replace(parsed, windows=windows)


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
