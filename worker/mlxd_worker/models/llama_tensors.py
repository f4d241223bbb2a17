"""What a checkpoint of a Llama-like decoder holds, and what the model takes besides its weights.

Invariants:
- All of it follows from the config: names, shapes, which weights may be packed and how.
- Experts' weights are expected in one tensor a linear, and may be there one by one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlxd_shared.cache_sizes import CacheSizes, WindowedLayers
from mlxd_shared.packed_weights import LAYER_PREFIX
from mlxd_shared.pass_sizes import PassSizes
from mlxd_worker.models.architecture import Footprint, Stack, TensorSpec
from mlxd_worker.models.config import DecoderConfig, ExpertsConfig
from mlxd_worker.models.packing import Packing

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GATED = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
ROUTER = "mlp.gate"
EXPERT_GATED = ("gate_proj", "up_proj")
EXPERT_DOWN = "down_proj"
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
    head = _weight(
        config,
        HEAD,
        (config.vocab, hidden),
        required=not config.tied_head,
        copy_of=EMBEDDING if config.tied_head else None,
    )
    embedding = _weight(config, EMBEDDING, (config.vocab, hidden))
    specs = [embedding, TensorSpec(FINAL_NORM, (hidden,)), head]
    for index in range(config.layers):
        prefix = layer_prefix(index)
        specs += [
            TensorSpec(f"{prefix}{norm}.weight", (hidden,)) for norm in norms_of(config).stored
        ]
        specs += _attention(config, prefix)
        experts = config.experts
        if experts is not None and experts.layers[index]:
            specs += _experts(config, experts, prefix)
        else:
            specs += _dense(config, prefix)
        # Old checkpoints store the rotary table, which follows from the config.
        table = f"{prefix}self_attn.rotary_emb.inv_freq"
        specs.append(TensorSpec(table, (config.head_dim // 2,), required=False))
    return tuple(specs)


def _attention(config: DecoderConfig, prefix: str) -> list[TensorSpec]:
    hidden, queries = config.hidden, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
    }
    specs = _linears(config, prefix, shapes)
    if config.head_norms:
        specs += [TensorSpec(f"{prefix}{name}.weight", (config.head_dim,)) for name in HEAD_NORMS]
    return specs


def _dense(config: DecoderConfig, prefix: str) -> list[TensorSpec]:
    hidden, mlp, biased = config.hidden, config.mlp, config.mlp_bias
    shapes = dict.fromkeys(GATED, (mlp, hidden, biased))
    return _linears(config, prefix, shapes | {DOWN: (hidden, mlp, biased)})


def _experts(config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> list[TensorSpec]:
    """Return the router's weight, and each expert's in one tensor or one by one."""
    hidden, mlp = config.hidden, experts.mlp
    specs = [_weight(config, f"{prefix}{ROUTER}.weight", (experts.count, hidden))]
    for name in EXPERT_LINEARS:
        outputs, inputs = (hidden, mlp) if name == EXPERT_DOWN else (mlp, hidden)
        stack = expert_stack(prefix, name, count=experts.count)
        whole = _weight(config, f"{stack.stem}.weight", (experts.count, outputs, inputs))
        specs.append(replace(whole, parts=tuple(f"{part}.weight" for part in stack.parts)))
    return specs


def expert_stack(prefix: str, name: str, *, count: int) -> Stack:
    """Return the names of one linear of all experts of a layer."""
    parts = tuple(f"{prefix}mlp.experts.{expert}.{name}" for expert in range(count))
    return Stack(f"{prefix}mlp.switch_mlp.{name}", parts)


def layer_prefix(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{LAYER_PREFIX}{index}."


def _linears(
    config: DecoderConfig, prefix: str, shapes: Mapping[str, tuple[int, int, bool]]
) -> list[TensorSpec]:
    """Return weights, and biases where there are any, of (outputs, inputs, has a bias) by name."""
    specs: list[TensorSpec] = []
    for name, (outputs, inputs, has_bias) in shapes.items():
        specs.append(_weight(config, f"{prefix}{name}.weight", (outputs, inputs)))
        if has_bias:
            specs.append(TensorSpec(f"{prefix}{name}.bias", (outputs,)))
    return specs


def _weight(
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
    return TensorSpec(name, shape, required=required, copy_of=copy_of, packing=packing)


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
