"""What a checkpoint of a Llama-like decoder holds, and what the model takes besides its weights.

Invariants:
- All of it follows from the config: names, shapes, which weights may be packed and how.
- Experts' weights are expected in one tensor a linear, and may be there one by one.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.experts import ExpertsConfig, SharedConfig
from mlxd_models.families.common.family import Footprint
from mlxd_models.families.common.packing import Packing
from mlxd_models.families.common.tensors import Operation, Source, Stack, TensorSpec
from mlxd_models.sizes.cache_sizes import CacheSizes, WindowedLayers
from mlxd_models.sizes.packed_weights import LAYER_PREFIX
from mlxd_models.sizes.pass_sizes import PassSizes

LLAMA_BUILDER = "mlxd_worker.models.families.llama"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
SINKS = "self_attn.sinks"
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GATED = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
CORRECTION = "mlp.gate.e_score_correction_bias"
EXPERT_GATED = ("gate_proj", "up_proj")
EXPERT_DOWN = "down_proj"
FUSED_GATED = "mlp.experts.gate_up_proj"
FUSED_DOWN = "mlp.experts.down_proj"
EXPERT_LINEARS = (*EXPERT_GATED, EXPERT_DOWN)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms over whole rows."""

    attention: str
    mlp: str
    attention_output: str | None = None
    mlp_output: str | None = None

    @property
    def stored(self) -> tuple[str, ...]:
        """All that a layer has."""
        optional = (self.attention_output, self.mlp_output)
        return (self.attention, self.mlp, *(name for name in optional if name is not None))


def norms_of(config: DecoderConfig) -> LayerNorms:
    """Return a layer's norms: one name means something else where outputs are normalised too."""
    if not config.output_norms:
        return LayerNorms("input_layernorm", "post_attention_layernorm")
    return LayerNorms(
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )


def llama_tensors(config: DecoderConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    hidden = config.hidden
    head = weight_spec(
        config,
        HEAD,
        (config.vocab, hidden),
        required=not config.tied_head,
        copy_of=EMBEDDING if config.tied_head else None,
    )
    embedding = weight_spec(config, EMBEDDING, (config.vocab, hidden))
    specs = [embedding, TensorSpec(FINAL_NORM, (hidden,)), head]
    for index in range(config.layers):
        prefix = layer_prefix(index)
        specs += [
            TensorSpec(f"{prefix}{norm}.weight", (hidden,)) for norm in norms_of(config).stored
        ]
        specs += _attention(config, prefix)
        specs += feed_specs(config, prefix, routed=is_routed(config, index))
        # Old checkpoints store the rotary table, which follows from the config.
        table = f"{prefix}self_attn.rotary_emb.inv_freq"
        specs.append(TensorSpec(table, (config.head_dim // 2,), required=False))
    return tuple(specs)


def is_routed(config: DecoderConfig, index: int) -> bool:
    """Tell whether a layer has experts."""
    return config.experts is not None and config.experts.layers[index]


def feed_specs(config: DecoderConfig, prefix: str, *, routed: bool) -> list[TensorSpec]:
    """Return the tensors of a layer's feed-forward: dense, or of experts."""
    if routed and config.experts is not None:
        return _experts(config, config.experts, prefix)
    return _dense(config, prefix)


def _attention(config: DecoderConfig, prefix: str) -> list[TensorSpec]:
    hidden, queries = config.hidden, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
    }
    specs = linear_specs(config, prefix, shapes, joined=ATTENTION)
    if config.sinks:
        specs.append(TensorSpec(prefix + SINKS, (config.heads,)))
    if config.head_norms:
        specs += [TensorSpec(f"{prefix}{name}.weight", (config.head_dim,)) for name in HEAD_NORMS]
    return specs


def _dense(config: DecoderConfig, prefix: str) -> list[TensorSpec]:
    hidden, mlp, biased = config.hidden, config.mlp, config.mlp_bias
    shapes = dict.fromkeys(GATED, (mlp, hidden, biased))
    return linear_specs(config, prefix, shapes | {DOWN: (hidden, mlp, biased)}, joined=GATED)


def _experts(config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> list[TensorSpec]:
    """Return the router's weight, each expert's in one tensor or one by one, and those beside."""
    hidden, mlp = config.hidden, experts.mlp
    specs = [weight_spec(config, f"{prefix}{experts.router}.weight", (experts.count, hidden))]
    if experts.biased:
        specs.append(TensorSpec(f"{prefix}{experts.router}.bias", (experts.count,)))
    if experts.corrected:
        specs.append(TensorSpec(f"{prefix}{CORRECTION}", (experts.count,), exact=True))
    if experts.shared is not None:
        specs += _shared(config, experts.shared, prefix)
    for name in EXPERT_LINEARS:
        outputs, inputs = (hidden, mlp) if name == EXPERT_DOWN else (mlp, hidden)
        stack = expert_stack(prefix, name, experts)
        whole = weight_spec(config, f"{stack.stem}.weight", (experts.count, outputs, inputs))
        instead = ((_fused(config, experts, prefix, name),),) if experts.fused else ()
        parts = tuple(f"{part}.weight" for part in stack.parts)
        joins = f"{prefix}{experts.stack}" if name in EXPERT_GATED else ""
        specs.append(replace(whole, parts=parts, instead=instead, joins=joins))
        if experts.biased:
            bias = f"{stack.stem}.bias"
            specs.append(TensorSpec(bias, (experts.count, outputs), joins=joins))
    return specs


def _fused(config: DecoderConfig, experts: ExpertsConfig, prefix: str, name: str) -> TensorSpec:
    """Return what may be stored in place of a stack, and of the one that it is joined with.

    It is stored without `.weight`.
    """
    hidden, mlp = config.hidden, experts.mlp
    stem, shape = prefix + FUSED_GATED, (experts.count, 2 * mlp, hidden)
    if name == EXPERT_DOWN:
        stem, shape = prefix + FUSED_DOWN, (experts.count, hidden, mlp)
    source = Source(stem, shape, Operation.KEEP)
    return TensorSpec(f"{stem}.weight", shape, packable=True, source=source)


def _shared(config: DecoderConfig, shared: SharedConfig, prefix: str) -> list[TensorSpec]:
    hidden, module = config.hidden, f"mlp.{shared.name}"
    gated = tuple(f"{module}.{name}" for name in EXPERT_GATED)
    shapes = dict.fromkeys(gated, (shared.mlp, hidden, False))
    shapes |= {f"{module}.{EXPERT_DOWN}": (hidden, shared.mlp, False)}
    if shared.gated:
        shapes |= {f"{module}_gate": (1, hidden, False)}
    return linear_specs(config, prefix, shapes, joined=gated)


def expert_stack(prefix: str, name: str, experts: ExpertsConfig) -> Stack:
    """Return the names of one linear of all experts of a layer."""
    parts = tuple(f"{prefix}mlp.experts.{expert}.{name}" for expert in range(experts.count))
    return Stack(f"{prefix}{experts.stack}.{name}", parts)


def layer_prefix(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{LAYER_PREFIX}{index}."


def linear_specs(
    config: DecoderConfig,
    prefix: str,
    shapes: Mapping[str, tuple[int, int, bool]],
    *,
    joined: Collection[str] = (),
) -> list[TensorSpec]:
    """Return weights, and biases where there are any, of (outputs, inputs, has a bias) by name.

    joined: the names of those that a builder makes one of.
    """
    specs: list[TensorSpec] = []
    for name, (outputs, inputs, has_bias) in shapes.items():
        joins = prefix + name.rpartition(".")[0] if name in joined else ""
        weight = weight_spec(config, f"{prefix}{name}.weight", (outputs, inputs))
        specs.append(replace(weight, joins=joins))
        if has_bias:
            specs.append(TensorSpec(f"{prefix}{name}.bias", (outputs,), joins=joins))
    return specs


def weight_spec(
    config: DecoderConfig,
    name: str,
    shape: tuple[int, ...],
    *,
    required: bool = True,
    copy_of: str | None = None,
) -> TensorSpec:
    """Return the spec of a weight that may be packed as the config says."""
    packing: Packing | None = None
    if config.packing is not None:
        packing = config.packing.of(name.removesuffix(".weight"), inputs=shape[-1])
    return TensorSpec(
        name, shape, required=required, copy_of=copy_of, packing=packing, packable=True
    )


def llama_footprint(config: DecoderConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    joined = (config.heads + 2 * config.kv_heads) * config.head_dim
    per_layer = 2 * config.kv_heads * config.head_dim
    windows = Counter(window for window in config.windows if window is not None)
    return Footprint(
        context_max=config.context_max,
        caches=CacheSizes(
            kv_values_per_token=per_layer * config.windows.count(None),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            windows=tuple(
                WindowedLayers(window, per_layer * count) for window, count in windows.items()
            ),
        ),
        passes=PassSizes(
            hidden=config.hidden,
            projected=joined,
            mlp=config.feed_width,
            heads=config.heads,
            vocab=config.vocab,
        ),
    )
