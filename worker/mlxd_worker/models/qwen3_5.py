"""Qwen3.5, dense and text only: gated delta layers, and full attention every few layers.

Invariants:
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

from mlxd_shared.errors import InvalidModel
from mlxd_shared.requests import KVFormat
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.kinds import AttentionCache, AttentionGeometry, as_attention
from mlxd_worker.cache.plan import PassCaches, StepPlan
from mlxd_worker.cache.recurrent import RecurrentCache
from mlxd_worker.models.architecture import Architecture, Weights
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.delta_mixer import (
    DeltaMixer,
    delta_arrays,
    delta_cache,
    stored_by_mlx,
    take_delta,
)
from mlxd_worker.models.linear import Linear
from mlxd_worker.models.llama_tensors import EMBEDDING, FINAL_NORM, HEAD
from mlxd_worker.models.qwen3_5_config import HybridConfig, parse_qwen3_5
from mlxd_worker.models.qwen3_5_tensors import DELTA, qwen3_5_footprint, qwen3_5_tensors
from mlxd_worker.models.rotation import rotation_of, tables_of

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True)
class Attention:
    """One full attention layer's weights."""

    qkv: Linear
    query_norm: mx.array
    key_norm: mx.array
    output: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    mixer_norm: mx.array
    mixer: Attention | DeltaMixer
    mlp_norm: mx.array
    gate_up: mx.array
    down: mx.array


class Qwen35Model(Model):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: HybridConfig, weights: Weights) -> None:
        """Take all weights; nothing else keeps them.

        Raises:
            InvalidModel: the layers are stored in different layouts.
        """
        self.config = config
        decoder = config.decoder
        self._embedding = weights.take(EMBEDDING)
        taker = _Taker(config, weights, self._embedding.dtype)
        self._layers = tuple(taker.layer(index) for index in range(decoder.layers))
        self._final_norm = taker.norm(FINAL_NORM)
        self._head = self._embedding if decoder.tied_head else weights.take(HEAD)
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
        return self._embedding.dtype

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
        plan = caches.plan(
            batch.rows,
            offsets=batch.offsets,
            lengths=batch.lengths,
            width=batch.width,
            dtype=self.dtype,
        )
        eps = self.config.decoder.norm_eps
        rows = self._embedding[batch.tokens.reshape(-1)]
        for layer, cache in zip(self._layers, caches.layers, strict=True):
            normed = mx.fast.rms_norm(rows, layer.mixer_norm, eps)
            if isinstance(layer.mixer, DeltaMixer):
                assert isinstance(cache, RecurrentCache)
                rows = rows + layer.mixer(normed, cache, plan)
            else:
                attention = as_attention(cache)
                rows = rows + self._attend(layer.mixer, normed, attention, plan, batch.offsets)
            rows = rows + self._feed_forward(layer, mx.fast.rms_norm(rows, layer.mlp_norm, eps))
        return mx.fast.rms_norm(rows, self._final_norm, eps)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [M, vocab], lazy."""
        return (hidden @ self._head.T).astype(mx.float32)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {EMBEDDING: self._embedding, FINAL_NORM: self._final_norm}
        if not self.config.decoder.tied_head:
            named[HEAD] = self._head
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
            self._rotate(mx.fast.rms_norm(queries, layer.query_norm, eps), offsets),
            self._rotate(mx.fast.rms_norm(keys, layer.key_norm, eps), offsets),
            values,
            plan,
            scale=self._scale,
        )
        gated = (read * mx.sigmoid(gates)).transpose(0, 2, 1, 3)
        return layer.output(gated.reshape(normed.shape[0], -1))

    def _rotate(self, heads: mx.array, offsets: mx.array) -> mx.array:
        rotated, gain = self._rotation(heads, offsets), self.config.decoder.rope.gain
        if gain == 1.0:
            return rotated
        dims = self.config.rotary_dim
        return mx.concatenate([gain * rotated[..., :dims], rotated[..., dims:]], axis=-1)

    def _feed_forward(self, layer: Layer, normed: mx.array) -> mx.array:
        both = normed @ layer.gate_up.T
        gate, up = mx.split(both, 2, axis=-1)
        return (gate * mx.sigmoid(gate) * up) @ layer.down.T


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
        prefix = f"model.layers.{index}."
        return Layer(
            mixer_norm=self.norm(f"{prefix}input_layernorm.weight"),
            mixer=self._attention(prefix) if self._config.full[index] else self._delta(prefix),
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._weights.take_stacked([f"{prefix}{name}.weight" for name in _GATED]),
            down=self._weights.take(f"{prefix}mlp.down_proj.weight"),
        )

    def _attention(self, prefix: str) -> Attention:
        decoder = self._config.decoder
        return Attention(
            qkv=self._linear(prefix, _ATTENTION, has_bias=decoder.qkv_bias),
            query_norm=self.norm(f"{prefix}self_attn.q_norm.weight"),
            key_norm=self.norm(f"{prefix}self_attn.k_norm.weight"),
            output=self._linear(prefix, ("self_attn.o_proj",), has_bias=decoder.output_bias),
        )

    def _linear(self, prefix: str, names: tuple[str, ...], *, has_bias: bool) -> Linear:
        stacked = self._weights.take_stacked
        return Linear(
            weight=stacked([f"{prefix}{name}.weight" for name in names]),
            bias=stacked([f"{prefix}{name}.bias" for name in names]) if has_bias else None,
        )

    def _delta(self, prefix: str) -> DeltaMixer:
        weights = take_delta(self._config.delta, self._weights, prefix + DELTA)
        return DeltaMixer(self._config.delta, weights, norm_eps=self._config.decoder.norm_eps)


def _arrays(layer: Layer) -> Mapping[str, mx.array]:
    named = {
        "mixer_norm": layer.mixer_norm,
        "mlp_norm": layer.mlp_norm,
        "gate_up": layer.gate_up,
        "down": layer.down,
    }
    if isinstance(layer.mixer, DeltaMixer):
        return named | dict(delta_arrays(layer.mixer.weights))
    named |= {"query_norm": layer.mixer.query_norm, "key_norm": layer.mixer.key_norm}
    for name, linear in (("qkv", layer.mixer.qkv), ("output", layer.mixer.output)):
        named[f"{name}.weight"] = linear.weight
        if linear.bias is not None:
            named[f"{name}.bias"] = linear.bias
    return named


QWEN3_5 = Architecture(
    parse=parse_qwen3_5, tensors=qwen3_5_tensors, footprint=qwen3_5_footprint, build=Qwen35Model
)
