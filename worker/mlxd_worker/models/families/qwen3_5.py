"""Qwen3.5 and its kin, text only: gated delta layers, and full attention every few layers.

Invariants:
- Attention normalises queries and keys by head, rotates only the first part of a head, and gates
  its result; queries and gates alternate head by head in one product with keys and values.
- A published checkpoint stores norms as their distance from one (all but the gated ones) and the
  convolution as `[channels, 1, kernel]`; one that went through mlx-lm has both converted. The
  convolution's shape tells which it is, and all layers must agree.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.common.decoder import ATTENTION, layer_prefix
from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_models.families.hybrid.tensors import DELTA
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches, StepPlan
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kinds import AttentionCache, AttentionGeometry, as_attention
from mlxd_worker.cache.layers.recurrent import RecurrentCache
from mlxd_worker.kernels.exponentials import times_sigmoid
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.base import Batch, Capabilities, plan_pass
from mlxd_worker.models.families.delta_mixer import (
    DeltaMixer,
    delta_cache,
    is_stored_by_mlx,
    take_delta,
)
from mlxd_worker.models.layers.llama_layers import (
    Decoder,
    FeedForward,
    rotation_of,
    take_feed,
)
from mlxd_worker.models.weights.linear import Projection, Weighted
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class Attention(Weighted):
    """One full attention layer's weights."""

    qkv: Projection
    query_norm: mx.array
    key_norm: mx.array
    output: Projection


@dataclass(frozen=True, slots=True)
class Layer(Weighted):
    """One decoder layer."""

    mixer_norm: mx.array
    mixer: Attention | DeltaMixer
    feed: FeedForward


class Qwen35Model(Decoder[Layer]):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: HybridConfig, weights: Reader) -> None:
        """Take all weights; raises InvalidModel if layers are stored in different layouts."""
        self.config = config
        decoder = config.decoder
        taker = _Taker(config, weights)
        self._rotation = rotation_of(decoder.rope, config.rotary_dim)
        geometry = AttentionGeometry(kv_heads=decoder.kv_heads, head_dim=decoder.head_dim)
        super().__init__(
            decoder,
            weights,
            map(taker.layer, range(decoder.layers)),
            lambda name: Norm(taker.norm(name), decoder.norm_eps),
            rotations=[self._rotation],
            attention=[geometry if full else None for full in config.full],
        )
        self.capabilities = Capabilities()
        self._scale = decoder.head_dim**-0.5

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches: of attention in form `kv`, recurrent ones for the other layers."""
        return [
            delta_cache(self.config.delta, self.dtype) if cache is None else cache
            for cache in super().new_caches(kv=kv, context_max=context_max)
        ]

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return hidden rows, normalised, lazy."""
        plan = plan_pass(batch, caches, self.dtype)
        eps = self.config.decoder.norm_eps

        def do_layer(layer: Layer, cache: LayerCache | None, rows: mx.array) -> mx.array:
            normed = mx.fast.rms_norm(rows, layer.mixer_norm, eps)
            if isinstance(layer.mixer, DeltaMixer):
                assert isinstance(cache, RecurrentCache)
                return layer.feed(rows + layer.mixer(normed, cache, plan))
            attention = as_attention(cache)
            read = self._attend(layer.mixer, normed, attention, plan, batch.turned)
            return layer.feed(rows + read)

        ids, is_wide = batch.tokens.reshape(-1), batch.width > 1
        return self._run(ids, caches, do_layer, is_wide=is_wide, inlays=batch.inlays)

    def _attend(
        self,
        layer: Attention,
        normed: mx.array,
        cache: AttentionCache,
        plan: StepPlan,
        turned: mx.array,
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
        queries = self._rotate(mx.fast.rms_norm(queries, layer.query_norm, eps), turned, plan)
        keys = self._rotate(mx.fast.rms_norm(keys, layer.key_norm, eps), turned, plan)
        read = cache.attend(Asked(queries, keys, values, plan, self._scale))
        gated = times_sigmoid(read, gates).transpose(0, 2, 1, 3)
        return layer.output(gated.reshape(normed.shape[0], -1))

    def _rotate(self, heads: mx.array, turned: mx.array, plan: StepPlan) -> mx.array:
        rotated, gain = self._rotation(heads, turned, plan), self.config.decoder.rope.gain
        if gain == 1.0:
            return rotated
        dims = self.config.rotary_dim
        return mx.concatenate([gain * rotated[..., :dims], rotated[..., dims:]], axis=-1)


class _Taker:
    """Takes layers from a checkpoint of either layout."""

    def __init__(self, config: HybridConfig, weights: Reader) -> None:
        self._config = config
        self._weights = weights
        recurrent = [index for index, full in enumerate(config.full) if not full]
        by_mlx = [
            is_stored_by_mlx(config.delta, weights, f"model.layers.{index}.{DELTA}")
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
        weight = (self._weights.take_float32(name) + 1).astype(self._weights.dtype)
        mx.eval(weight)
        return weight

    def layer(self, index: int) -> Layer:
        """Take one layer."""
        prefix, decoder = layer_prefix(index), self._config.decoder
        mixer_norm = self.norm(f"{prefix}input_layernorm.weight")
        mixer = self._attention(prefix) if self._config.full[index] else self._delta(prefix)
        norm = Norm(self.norm(f"{prefix}post_attention_layernorm.weight"), decoder.norm_eps)
        return Layer(mixer_norm, mixer, take_feed(decoder, self._weights, index, norm))

    def _attention(self, prefix: str) -> Attention:
        decoder = self._config.decoder
        names, output = [prefix + name for name in ATTENTION], [f"{prefix}self_attn.o_proj"]
        return Attention(
            qkv=self._weights.linear(names, has_bias=decoder.qkv_bias),
            query_norm=self.norm(f"{prefix}self_attn.q_norm.weight"),
            key_norm=self.norm(f"{prefix}self_attn.k_norm.weight"),
            output=self._weights.linear(output, has_bias=decoder.output_bias),
        )

    def _delta(self, prefix: str) -> DeltaMixer:
        delta, eps = self._config.delta, self._config.decoder.norm_eps
        return take_delta(delta, self._weights, prefix + DELTA, norm_eps=eps)


build = Qwen35Model
