"""A decoder that keeps latents: DeepSeek-V2 and V3, GLM-4-MoE-lite, told apart by config alone.

What keys and values are made of is kept, and neither is ever made. A head's plain key is `K l` for
a latent l, its value `V l`; so a query q meets a key as `(K^T q) . l`, and what it reads is `V`
times what it reads of latents.

Invariants:
- Queries are taken to latents (`absorbing`) before attention, what they read to values
  (`expanding`) after it: for prompts as for single tokens, so that nothing grows with the context
  but the latents themselves (decision 0035).
- The part that rotates is apart: one key for all heads, stored behind the latent. A rotation's gain
  is on the queries alone, squared.
"""

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlxd_models.families.common.decoder import layer_prefix, norms_of
from mlxd_models.families.common.tensors import Stack
from mlxd_models.families.latent.config import LATENT_NORM_EPS, LatentConfig
from mlxd_models.families.latent.tensors import (
    ABSORBING,
    BOTH_UP,
    ENTRY_DOWN,
    EXPANDING,
    LATENT_NORM,
    OUTPUT,
    QUERY,
    QUERY_DOWN,
    QUERY_NORM,
    QUERY_UP,
)
from mlxd_worker.cache.arenas.plan import PassCaches, StepPlan
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.latent import LatentCache
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.base import Batch, Capabilities, plan_pass
from mlxd_worker.models.layers.llama_layers import (
    Decoder,
    FeedForward,
    Rotation,
    rotation_of,
    take_feed,
    take_norm,
)
from mlxd_worker.models.weights.expert_linear import (
    HeadLinear,
    HeadProjection,
    head_projection,
    packed_heads,
)
from mlxd_worker.models.weights.fused import add_projection, normed_times
from mlxd_worker.models.weights.linear import Linear, PackedLinear, Projection, Weighted
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class LatentAttention(Weighted):
    """One layer's weights, but for those that lead out of it."""

    config: LatentConfig
    norm: Norm
    down: Projection
    """Of a row: its queries, or what they are made of; its latent; its rotating key."""
    query_norm: Norm | None
    query_up: Projection | None
    latent_norm: Norm
    absorbing: HeadProjection
    expanding: HeadProjection
    rotation: Rotation

    def __call__(
        self, rows: mx.array, offsets: mx.array, cache: LatentCache, plan: StepPlan
    ) -> mx.array:
        """Return what flat rows `[N * width, hidden]` read, `[N * width, values]`; lazy."""
        config, count = self.config, rows.shape[0]
        heads, width = config.decoder.heads, plan.width
        joined = normed_times(rows, self.norm, self.down)
        first = joined.shape[1] - config.entry_dim
        plain, turning = mx.split(self._queries(joined[:, :first]), [config.plain_dim], axis=-1)
        absorbed = self.absorbing(plain.swapaxes(0, 1))
        latents = mx.fast.rms_norm(
            joined[:, first : first + config.rank], self.latent_norm.weight, self.latent_norm.eps
        )
        # Queries and keys rotate alike: one call for both.
        keys = joined[:, None, first + config.rank :]
        rotating = mx.concatenate([turning, keys], axis=1).reshape(
            -1, width, heads + 1, config.rotary_dim
        )
        rotated = self.rotation(rotating.swapaxes(1, 2), offsets, plan)
        gain = self.rotation.config.gain
        parts = [
            absorbed.reshape(heads, -1, width, config.rank).swapaxes(0, 1),
            rotated[:, :heads] if gain == 1.0 else rotated[:, :heads] * gain**2,
        ]
        entries = [latents.reshape(-1, 1, width, config.rank), rotated[:, heads:]]
        read = cache.attend(
            mx.concatenate(parts, axis=-1),
            mx.concatenate(entries, axis=-1),
            plan,
            scale=config.decoder.scale,
        )
        out = self.expanding(read.swapaxes(0, 1).reshape(heads, count, config.rank))
        return out.swapaxes(0, 1).reshape(count, -1)

    def _queries(self, rows: mx.array) -> mx.array:
        """Return all heads' queries, `[M, heads, query_dim]`."""
        if self.query_norm is not None:
            rows = mx.fast.rms_norm(rows, self.query_norm.weight, self.query_norm.eps)
        if self.query_up is not None:
            rows = self.query_up(rows)
        return rows.reshape(rows.shape[0], self.config.decoder.heads, -1)


@dataclass(frozen=True, slots=True)
class Layer(Weighted):
    """One decoder layer."""

    attention: LatentAttention
    output: Projection
    feed: FeedForward


class LatentModel(Decoder[Layer]):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: LatentConfig, weights: Reader) -> None:
        self.config = config
        decoder = config.decoder
        rotation = rotation_of(decoder.rope, config.rotary_dim)
        # A layer's latents: what all heads' keys and values are made of.
        geometry = AttentionGeometry(1, config.entry_dim, latent_dim=config.rank)
        super().__init__(
            decoder,
            weights,
            (_take_layer(config, weights, at, rotation) for at in range(decoder.layers)),
            partial(take_norm, decoder, weights),
            rotations=[rotation],
            attention=(geometry,) * decoder.layers,
        )
        self.capabilities = Capabilities(reads_chunks=True)

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return hidden rows, normalised, lazy."""
        plan = plan_pass(batch, caches, self.dtype)

        def do_layer(layer: Layer, cache: LayerCache | None, rows: mx.array) -> mx.array:
            assert isinstance(cache, LatentCache), "as the geometry makes them"
            read = layer.attention(rows, batch.offsets, cache, plan)
            return layer.feed(add_projection(rows, read, layer.output))

        is_wide = batch.width > 1 or bool(batch.counts)
        return self._run(batch.tokens.reshape(-1), caches, do_layer, is_wide=is_wide)


def _take_layer(config: LatentConfig, weights: Reader, index: int, rotation: Rotation) -> Layer:
    prefix, decoder = layer_prefix(index), config.decoder
    attention = take_latent_attention(config, weights, prefix, rotation)
    output = weights.linear([prefix + OUTPUT], has_bias=decoder.output_bias)
    norm = take_norm(decoder, weights, f"{prefix}{norms_of(decoder).mlp}.weight")
    return Layer(attention, output, take_feed(decoder, weights, index, norm))


def take_latent_attention(
    config: LatentConfig, weights: Reader, prefix: str, rotation: Rotation
) -> LatentAttention:
    """Take one layer's weights, but for the output's."""
    decoder, lean = config.decoder, config.query_rank is not None
    queries = QUERY_DOWN if lean else QUERY
    down = weights.linear([prefix + queries, prefix + ENTRY_DOWN], has_bias=decoder.qkv_bias)
    absorbing, expanding = _take_up(config, weights, prefix)
    query_norm = weights.take(prefix + QUERY_NORM) if lean else None
    return LatentAttention(
        config=config,
        norm=Norm(weights.take(f"{prefix}input_layernorm.weight"), decoder.norm_eps),
        down=down,
        query_norm=None if query_norm is None else Norm(query_norm, LATENT_NORM_EPS),
        query_up=weights.linear([prefix + QUERY_UP]) if lean else None,
        latent_norm=Norm(weights.take(prefix + LATENT_NORM), LATENT_NORM_EPS),
        absorbing=absorbing,
        expanding=expanding,
        rotation=rotation,
    )


def _take_up(
    config: LatentConfig, weights: Reader, prefix: str
) -> tuple[HeadProjection, HeadProjection]:
    """Take what keys and values are made by, either layout: absorbing, then expanding."""
    if weights.has(f"{prefix}{ABSORBING}.weight"):
        absorbing, expanding = (
            head_projection(weights.experts([Stack(prefix + name, ())]), turned=True)
            for name in (ABSORBING, EXPANDING)
        )
        return absorbing, expanding
    both = weights.linear([prefix + BOTH_UP])
    keys, values = (partial(_part, config, which) for which in range(2))
    if isinstance(both, PackedLinear):
        absorbing = packed_heads(both.cut(keys), turned=False)
        return absorbing, packed_heads(both.cut(values), turned=True)
    assert isinstance(both, Linear), "one weight is in one form"
    absorbing = HeadLinear(keys(both.weight), turned=False)
    return absorbing, HeadLinear(values(both.weight), turned=True)


def _part(config: LatentConfig, which: int, array: mx.array) -> mx.array:
    """Return keys' (0) or values' (1) part of rows that lie head by head; it owns its memory."""
    by_head = array.reshape(config.decoder.heads, config.plain_dim + config.value_dim, -1)
    part = mx.contiguous(mx.split(by_head, [config.plain_dim], axis=1)[which])
    mx.eval(part)
    return part


build = LatentModel
