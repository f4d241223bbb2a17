"""Qwen3.5 and its kin, text only: gated delta layers, and full attention every few layers.

Invariants:
- What sets a family apart is in its config, not in a model of its own.
- Rows are flat `[rows * width, hidden]` everywhere but inside a layer's mixer.
- Attention normalises queries and keys by head, rotates only the first part of a head, and gates
  its result; queries and gates alternate head by head in one product with keys and values.
- A published checkpoint stores norms as their distance from one (all but the gated ones) and the
  convolution as `[channels, 1, kernel]`; one that went through mlx-lm has both converted. The
  convolution's shape tells which it is, and all layers must agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.common.decoder import ATTENTION, FINAL_NORM, is_routed, layer_prefix
from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_models.families.hybrid.tensors import DELTA
from mlxd_models.sizes.weight_forms import UNPACKED_LAYERS
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches, StepPlan
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionCache, AttentionGeometry, as_attention
from mlxd_worker.cache.layers.recurrent import RecurrentCache
from mlxd_worker.kernels.exponentials import times_sigmoid
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.base import Batch, plan_pass
from mlxd_worker.models.building import Weights
from mlxd_worker.models.capabilities import Capabilities
from mlxd_worker.models.families.delta_mixer import (
    DeltaMixer,
    delta_arrays,
    delta_cache,
    stored_by_mlx,
    take_delta,
)
from mlxd_worker.models.layers.llama_layers import (
    FeedForward,
    rotation_of,
    tables_of,
    take_embedding,
    take_ends,
    take_feed,
)
from mlxd_worker.models.weights.linear import Projection, is_packed, named_arrays, packed_rows_max


@dataclass(frozen=True, slots=True)
class Attention:
    """One full attention layer's weights."""

    qkv: Projection
    query_norm: mx.array
    key_norm: mx.array
    output: Projection


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    mixer_norm: mx.array
    mixer: Attention | DeltaMixer
    feed: FeedForward

    @property
    def packed(self) -> bool:
        """Whether weights that stay packed may be unpacked for many rows."""
        if isinstance(self.mixer, DeltaMixer):
            products = (self.mixer.weights.projection, self.mixer.weights.output)
        else:
            products = (self.mixer.qkv, self.mixer.output)
        return any(map(is_packed, products)) or self.feed.packed


class Qwen35Model:
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: HybridConfig, weights: Weights) -> None:
        """Take all weights; nothing else keeps them.

        Raises:
            InvalidModel: the layers are stored in different layouts.
        """
        self.config = config
        decoder = config.decoder
        embedding = take_embedding(weights)
        taker = _Taker(config, weights, embedding.dtype)
        self._layers = tuple(taker.layer(index) for index in range(decoder.layers))
        norm = Norm(taker.norm(FINAL_NORM), decoder.norm_eps)
        self._ends = take_ends(weights, embedding, norm, tied_head=decoder.tied_head)
        self._packed = any(layer.packed for layer in self._layers)
        self.capabilities = Capabilities()
        self._scale = decoder.head_dim**-0.5
        self._rotation = rotation_of(decoder.rope, config.rotary_dim)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.decoder.vocab

    @property
    def context_max(self) -> int:
        """The most tokens a row may hold."""
        return self.config.decoder.context_max

    @property
    def dtype(self) -> mx.Dtype:
        """The weights' type."""
        return self._ends.embedding.dtype

    @property
    def attention(self) -> tuple[AttentionGeometry | None, ...]:
        """Each full layer's keys and values."""
        decoder = self.config.decoder
        geometry = AttentionGeometry(kv_heads=decoder.kv_heads, head_dim=decoder.head_dim)
        return tuple(geometry if full else None for full in self.config.full)

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches: of attention in form `kv`, recurrent ones for the other layers."""
        longest = self.context_max if context_max is None else context_max
        return [
            delta_cache(self.config.delta, self.dtype)
            if geometry is None
            else geometry.new_cache(self.dtype, kv=kv, context_max=longest)
            for geometry in self.attention
        ]

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return hidden rows, normalised, lazy."""
        plan = plan_pass(batch, caches, self.dtype)
        eps = self.config.decoder.norm_eps
        rows = self._ends.embed(batch.tokens)
        # A GPU holds what is unpacked until it is done: not of all layers at once.
        unpacks = self._packed and batch.width > 1 and rows.shape[0] > packed_rows_max()
        for index, (layer, cache) in enumerate(zip(self._layers, caches.layers, strict=True)):
            normed = mx.fast.rms_norm(rows, layer.mixer_norm, eps)
            if isinstance(layer.mixer, DeltaMixer):
                assert isinstance(cache, RecurrentCache)
                rows = rows + layer.mixer(normed, cache, plan)
            else:
                attention = as_attention(cache)
                rows = rows + self._attend(layer.mixer, normed, attention, plan, batch.offsets)
            rows = layer.feed(rows)
            if unpacks and (index + 1) % UNPACKED_LAYERS == 0:
                mx.eval(rows)
        return self._ends.normalise(rows)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [M, vocab], lazy."""
        return self._ends.logits(hidden)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = self._ends.arrays()
        named |= tables_of([self._rotation])
        for index, layer in enumerate(self._layers):
            named |= {f"layers.{index}.{name}": array for name, array in _arrays(layer).items()}
        return named

    def _attend(
        self,
        layer: Attention,
        normed: mx.array,
        cache: AttentionCache,
        plan: StepPlan,
        offsets: mx.array,
    ) -> mx.array:
        decoder = self.config.decoder
        heads, kv_heads, eps = decoder.heads, decoder.kv_heads, decoder.norm_eps
        joined = layer.qkv(normed).reshape(-1, plan.width, 2 * (heads + kv_heads), decoder.head_dim)
        joined = joined.transpose(0, 2, 1, 3)
        queries, gates = joined[:, 0 : 2 * heads : 2], joined[:, 1 : 2 * heads : 2]
        keys, values = (
            joined[:, 2 * heads : 2 * heads + kv_heads],
            joined[:, 2 * heads + kv_heads :],
        )
        read = cache.attend(
            self._rotate(mx.fast.rms_norm(queries, layer.query_norm, eps), offsets, plan),
            self._rotate(mx.fast.rms_norm(keys, layer.key_norm, eps), offsets, plan),
            values,
            plan,
            scale=self._scale,
        )
        gated = times_sigmoid(read, gates).transpose(0, 2, 1, 3)
        return layer.output(gated.reshape(normed.shape[0], -1))

    def _rotate(self, heads: mx.array, offsets: mx.array, plan: StepPlan) -> mx.array:
        rotated, gain = self._rotation(heads, offsets, plan), self.config.decoder.rope.gain
        if gain == 1.0:
            return rotated
        dims = self.config.rotary_dim
        return mx.concatenate([gain * rotated[..., :dims], rotated[..., dims:]], axis=-1)


class _Taker:
    """Takes layers from a checkpoint of either layout."""

    def __init__(self, config: HybridConfig, weights: Weights, dtype: mx.Dtype) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        recurrent = [index for index, full in enumerate(config.full) if not full]
        by_mlx = [
            stored_by_mlx(config.delta, weights, f"model.layers.{index}.{DELTA}")
            for index in recurrent
        ]
        if len(set(by_mlx)) > 1:
            name = f"model.layers.{recurrent[by_mlx.index(not by_mlx[0])]}.{DELTA}conv1d.weight"
            raise InvalidModel("is stored in another layout than the layers before", field=name)
        self._norms_from_one = not by_mlx[0]

    def norm(self, name: str) -> mx.array:
        """Take a norm's weight, such that it is what the normalised values are multiplied by."""
        if not self._norms_from_one:
            return self._weights.take(name)
        # Added before rounding: next to one, bfloat16 keeps few digits of a small distance.
        weight = (self._weights.take_float32(name) + 1).astype(self._dtype)
        mx.eval(weight)
        return weight

    def layer(self, index: int) -> Layer:
        """Take one layer."""
        prefix, decoder = layer_prefix(index), self._config.decoder
        mixer_norm = self.norm(f"{prefix}input_layernorm.weight")
        mixer = self._attention(prefix) if self._config.full[index] else self._delta(prefix)
        norm = Norm(self.norm(f"{prefix}post_attention_layernorm.weight"), decoder.norm_eps)
        routed = is_routed(decoder, index)
        feed = take_feed(decoder, self._weights, prefix, norm, routed=routed)
        return Layer(mixer_norm, mixer, feed)

    def _attention(self, prefix: str) -> Attention:
        decoder = self._config.decoder
        return Attention(
            qkv=self._linear(prefix, ATTENTION, has_bias=decoder.qkv_bias),
            query_norm=self.norm(f"{prefix}self_attn.q_norm.weight"),
            key_norm=self.norm(f"{prefix}self_attn.k_norm.weight"),
            output=self._linear(prefix, ("self_attn.o_proj",), has_bias=decoder.output_bias),
        )

    def _linear(self, prefix: str, names: tuple[str, ...], *, has_bias: bool) -> Projection:
        return self._weights.linear([prefix + name for name in names], has_bias=has_bias)

    def _delta(self, prefix: str) -> DeltaMixer:
        weights = take_delta(self._config.delta, self._weights, prefix + DELTA)
        return DeltaMixer(self._config.delta, weights, norm_eps=self._config.decoder.norm_eps)


def _arrays(layer: Layer) -> Mapping[str, mx.array]:
    named = {"mixer_norm": layer.mixer_norm} | dict(layer.feed.arrays())
    if isinstance(layer.mixer, DeltaMixer):
        return named | dict(delta_arrays(layer.mixer.weights))
    named |= {"query_norm": layer.mixer.query_norm, "key_norm": layer.mixer.key_norm}
    named |= named_arrays("qkv", layer.mixer.qkv)
    return named | named_arrays("output", layer.mixer.output)


build = Qwen35Model
