"""The Llama family: Llama 2 and 3, SmolLM, Mistral; tied or untied head, biases, windows.

Invariants:
- Rows are flat `[rows * width, hidden]` everywhere but inside attention.
- Queries, keys and values come from one product, gate and up from another: their weights are joined
  while loading, and the separate ones are never kept.
- No `mx.compile`: on CPU it needs a C++ compiler at run time and gains about a tenth; where it pays
  (CUDA), the step is compiled around `forward`, not in here.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_shared.cache_sizes import CacheSizes, WindowedLayers
from mlxd_shared.packed_weights import UNPACKED_LAYERS
from mlxd_shared.pass_sizes import PassSizes
from mlxd_worker.cache.kinds import AttentionCache, AttentionGeometry, as_attention
from mlxd_worker.cache.kv import Asked, KVCache
from mlxd_worker.cache.plan import PassCaches, StepPlan
from mlxd_worker.kernels.decode_attention import serves
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.architecture import Architecture, Footprint, TensorSpec, Weights
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.config import DecoderConfig, parse_llama, parse_mistral
from mlxd_worker.models.fused import added, gated, logits_of, normed_times
from mlxd_worker.models.linear import PackedLinear, Projection, named_arrays, packed_rows_max
from mlxd_worker.models.packing import Packing

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    attention_norm: mx.array
    qkv: Projection
    output: Projection
    mlp_norm: mx.array
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class _Pass:
    """One batch of those that go through the layers together."""

    batch: Batch
    plan: StepPlan


class LlamaModel(Model):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        """Take all weights; nothing else keeps them."""
        self.config = config
        self._embedding = weights.linear([_stem(EMBEDDING)])
        self._layers = tuple(_take_layer(config, weights, index) for index in range(config.layers))
        self._final_norm = weights.take(FINAL_NORM)
        self._head = self._embedding if config.tied_head else weights.linear([_stem(HEAD)])
        self._scale = config.head_dim**-0.5
        periods = config.rope.periods(config.head_dim)
        self._rope_periods = None if periods is None else mx.array(periods, dtype=mx.float32)
        self._packed = any(isinstance(layer.gate_up, PackedLinear) for layer in self._layers)
        self._in_place = not config.rope.interleaved and serves(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=self._embedding.dtype,
        )

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab

    @property
    def context_max(self) -> int:
        """The most tokens a row may hold."""
        return self.config.context_max

    @property
    def dtype(self) -> mx.Dtype:
        """The weights' type."""
        return self._embedding.dtype

    @property
    def decodes_in_place(self) -> bool:
        """Whether the kernel for that serves this shape, on this device."""
        return self._in_place

    @property
    def attention(self) -> tuple[AttentionGeometry, ...]:
        """Each layer's keys and values."""
        config = self.config
        return tuple(
            AttentionGeometry(kv_heads=config.kv_heads, head_dim=config.head_dim, window=window)
            for window in config.windows
        )

    @property
    def joins_passes(self) -> bool:
        """Wherever weights are not packed: these are unpacked a few layers at a time."""
        return not self._packed

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return hidden rows, normalised, lazy."""
        return self.forward_joined([batch], caches)[0]

    def forward_joined(self, batches: Sequence[Batch], caches: PassCaches) -> list[mx.array]:
        """Do `forward` for several batches; their rows are together in all products."""
        passes = [_Pass(batch, self._plan(batch, caches)) for batch in batches]
        rows = self._embedding.lookup(_together([p.batch.tokens.reshape(-1) for p in passes]))
        # A GPU holds what is unpacked until it is done: not of all layers at once.
        wide = any(its.batch.width > 1 for its in passes)
        unpacks = self._packed and wide and rows.shape[0] > packed_rows_max()
        for index, (layer, cache) in enumerate(zip(self._layers, caches.layers, strict=True)):
            read = self._attend(layer, rows, as_attention(cache), passes)
            rows = added(rows, read, layer.output)
            rows = added(rows, self._gated(layer, rows), layer.down)
            if unpacks and (index + 1) % UNPACKED_LAYERS == 0:
                mx.eval(rows)
        return _apart(mx.fast.rms_norm(rows, self._final_norm, self.config.norm_eps), passes)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [M, vocab], lazy."""
        return logits_of(hidden, self._head)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {FINAL_NORM: self._final_norm} | named_arrays(_stem(EMBEDDING), self._embedding)
        if not self.config.tied_head:
            named |= named_arrays(_stem(HEAD), self._head)
        if self._rope_periods is not None:
            named["rope_periods"] = self._rope_periods
        for index, layer in enumerate(self._layers):
            named |= {f"layers.{index}.{name}": array for name, array in _arrays(layer).items()}
        return named

    def _plan(self, batch: Batch, caches: PassCaches) -> StepPlan:
        return caches.plan(
            batch.rows,
            offsets=batch.offsets,
            lengths=batch.lengths,
            width=batch.width,
            dtype=self.dtype,
        )

    def _attend(
        self, layer: Layer, rows: mx.array, cache: AttentionCache, passes: Sequence[_Pass]
    ) -> mx.array:
        """Return what the rows read, before the output projection."""
        config, first = self.config, passes[0]
        norm = Norm(layer.attention_norm, config.norm_eps)
        joined = normed_times(rows, norm, layer.qkv)
        if first.plan.in_place and isinstance(cache, KVCache) and self._in_place:
            periods = first.plan.shared(("periods",), self._periods)
            return cache.attend_joined(
                joined, periods, first.plan, heads=config.heads, scale=self._scale
            )
        asked = [
            self._asked(part, its) for part, its in zip(_apart(joined, passes), passes, strict=True)
        ]
        if len(asked) == 1:
            (it,) = asked
            read = [cache.attend(it.queries, it.keys, it.values, it.plan, scale=self._scale)]
        else:
            assert isinstance(cache, KVCache), "passes are joined over standard caches alone"
            read = cache.attend_joined_passes(asked, scale=self._scale)
        width = config.heads * config.head_dim
        return _together([part.transpose(0, 2, 1, 3).reshape(-1, width) for part in read])

    def _asked(self, joined: mx.array, its: _Pass) -> Asked:
        """Return one pass's rotated queries and keys, and its values."""
        config = self.config
        heads = config.heads + 2 * config.kv_heads
        split = joined.reshape(-1, its.batch.width, heads, config.head_dim).transpose(0, 2, 1, 3)
        # Queries and keys rotate alike: one call for both.
        rotating = config.heads + config.kv_heads
        rotated = mx.fast.rope(
            split[:, :rotating],
            config.head_dim,
            traditional=config.rope.interleaved,
            base=config.rope.base if self._rope_periods is None else None,
            scale=config.rope.position_scale,
            offset=its.batch.offsets,
            freqs=self._rope_periods,
        )
        queries, keys = rotated[:, : config.heads], rotated[:, config.heads :]
        return Asked(queries, keys, split[:, rotating:], its.plan)

    def _gated(self, layer: Layer, rows: mx.array) -> mx.array:
        norm = Norm(layer.mlp_norm, self.config.norm_eps)
        return gated(rows, norm, layer.gate_up, width=self.config.mlp)

    def _periods(self) -> mx.array:
        """Return by how many positions each pair of a head turns by one radian."""
        config = self.config
        periods = self._rope_periods
        if periods is None:
            steps = mx.arange(0, config.head_dim, 2, dtype=mx.float32)
            periods = mx.exp(steps * (math.log(config.rope.base) / config.head_dim))
        return periods / config.rope.position_scale


def _together(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=0)


def _apart(rows: mx.array, passes: Sequence[_Pass]) -> list[mx.array]:
    """Return each pass's share of flat rows that lie one pass after another."""
    if len(passes) == 1:
        return [rows]
    parts, first = [], 0
    for its in passes:
        parts.append(rows[first : first + its.batch.tokens.size])
        first += its.batch.tokens.size
    return parts


def llama_tensors(config: DecoderConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    hidden, queries = config.hidden, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (config.mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (config.mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, config.mlp, config.mlp_bias),
    }
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
        prefix = f"model.layers.{index}."
        specs += [
            TensorSpec(f"{prefix}{norm}.weight", (hidden,))
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        for name, (outputs, inputs, has_bias) in shapes.items():
            specs.append(_weight(config, f"{prefix}{name}.weight", (outputs, inputs)))
            if has_bias:
                specs.append(TensorSpec(f"{prefix}{name}.bias", (outputs,)))
        # Old checkpoints store the rotary table, which follows from the config.
        table = f"{prefix}self_attn.rotary_emb.inv_freq"
        specs.append(TensorSpec(table, (config.head_dim // 2,), required=False))
    return tuple(specs)


def _weight(
    config: DecoderConfig,
    name: str,
    shape: tuple[int, int],
    *,
    required: bool = True,
    copy_of: str | None = None,
) -> TensorSpec:
    """Return the spec of a weight that may be packed as the config says."""
    packing: Packing | None = config.packing
    suited = packing is not None and packing.suits(shape[1])
    return TensorSpec(
        name, shape, required=required, copy_of=copy_of, packing=packing if suited else None
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
            mlp=config.mlp,
            heads=config.heads,
            vocab=config.vocab,
        ),
    )


def _take_layer(config: DecoderConfig, weights: Weights, index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def linear(*names: str, has_bias: bool) -> Projection:
        return weights.linear([prefix + name for name in names], has_bias=has_bias)

    return Layer(
        attention_norm=weights.take(f"{prefix}input_layernorm.weight"),
        qkv=linear(*_ATTENTION, has_bias=config.qkv_bias),
        output=linear("self_attn.o_proj", has_bias=config.output_bias),
        mlp_norm=weights.take(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linear(*_GATED, has_bias=config.mlp_bias),
        down=linear("mlp.down_proj", has_bias=config.mlp_bias),
    )


def _arrays(layer: Layer) -> Mapping[str, mx.array]:
    named = {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm}
    linears = (
        ("qkv", layer.qkv),
        ("output", layer.output),
        ("gate_up", layer.gate_up),
        ("down", layer.down),
    )
    for name, linear in linears:
        named |= named_arrays(name, linear)
    return named


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


LLAMA = Architecture(
    parse=parse_llama, tensors=llama_tensors, footprint=llama_footprint, build=LlamaModel
)
MISTRAL = Architecture(
    parse=parse_mistral, tensors=llama_tensors, footprint=llama_footprint, build=LlamaModel
)
