"""A layer of a Llama-like decoder: its weights, and how they are taken from a checkpoint.

Invariants:
- Queries, keys and values come from one product, gate and up from another: their weights are joined
  while loading, and the separate ones are never kept.
- A rotation's gain on queries and on keys is in the scale of their products.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.decoder_tensors import (
    ATTENTION,
    CORRECTION,
    DOWN,
    EXPERT_DOWN,
    EXPERT_GATED,
    FUSED_DOWN,
    FUSED_GATED,
    GATED,
    HEAD_NORMS,
    SINKS,
    expert_stack,
    is_routed,
    layer_prefix,
    norms_of,
)
from mlxd_models.families.common.experts import ExpertsConfig, SharedConfig
from mlxd_models.families.common.tensors import Stack
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.building import Weights
from mlxd_worker.models.layers.feed_forward import Dense, Experts, FeedForward, Shared
from mlxd_worker.models.layers.rotation import Rotation
from mlxd_worker.models.weights.expert_linear import ExpertProjection
from mlxd_worker.models.weights.linear import Projection, is_packed, named_arrays


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms over each head's queries, and over each head's keys."""

    queries: Norm
    keys: Norm
    heads: int
    kv_heads: int

    def __call__(self, joined: mx.array) -> mx.array:
        """Return queries, keys and values `[M, heads and twice kv_heads, of one width]` normed."""
        split = joined.reshape(joined.shape[0], self.heads + 2 * self.kv_heads, -1)
        rotating = self.heads + self.kv_heads
        queries, keys = split[:, : self.heads], split[:, self.heads : rotating]
        parts = [
            mx.fast.rms_norm(queries, self.queries.weight, self.queries.eps),
            mx.fast.rms_norm(keys, self.keys.weight, self.keys.eps),
            split[:, rotating:],
        ]
        return mx.concatenate(parts, axis=1).reshape(joined.shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    attention_norm: Norm
    qkv: Projection
    head_norms: HeadNorms | None
    rotation: Rotation
    scale: float
    """What products of queries and keys are multiplied by."""
    sinks: mx.array | None
    """[heads]: scores that take a share of each head's attention."""
    output: Projection
    output_norm: Norm | None
    feed: FeedForward

    @property
    def packed(self) -> bool:
        """Whether weights that stay packed may be unpacked for many rows."""
        return is_packed(self.qkv) or is_packed(self.output) or self.feed.packed

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {"attention_norm": self.attention_norm.weight}
        named |= named_arrays("qkv", self.qkv) | named_arrays("output", self.output)
        if self.output_norm is not None:
            named["attention_output_norm"] = self.output_norm.weight
        if self.head_norms is not None:
            named["query_norm"] = self.head_norms.queries.weight
            named["key_norm"] = self.head_norms.keys.weight
        if self.sinks is not None:
            named["sinks"] = self.sinks
        return named | dict(self.feed.arrays())


def take_layer(config: DecoderConfig, weights: Weights, index: int, rotation: Rotation) -> Layer:
    """Take one layer's weights.

    Raises:
        InvalidModel: experts are packed unlike each other.
    """
    prefix, norms = layer_prefix(index), norms_of(config)
    return Layer(
        attention_norm=take_norm(config, weights, f"{prefix}{norms.attention}.weight"),
        qkv=weights.linear([prefix + name for name in ATTENTION], has_bias=config.qkv_bias),
        head_norms=_take_head_norms(config, weights, prefix) if config.head_norms else None,
        rotation=rotation,
        scale=config.scale * rotation.config.gain**2,
        sinks=weights.take(prefix + SINKS) if config.sinks else None,
        output=weights.linear([f"{prefix}self_attn.o_proj"], has_bias=config.output_bias),
        output_norm=_take_optional(config, weights, prefix, norms.attention_output),
        feed=_take_feed(config, weights, index),
    )


def take_norm(config: DecoderConfig, weights: Weights, name: str) -> Norm:
    """Take a norm, such that its weight is what the normalised values are multiplied by."""
    weight = weights.take(name)
    if config.norms_from_one:
        weight = 1 + weight
        mx.eval(weight)
    return Norm(weight, config.norm_eps)


def _take_optional(
    config: DecoderConfig, weights: Weights, prefix: str, name: str | None
) -> Norm | None:
    return None if name is None else take_norm(config, weights, f"{prefix}{name}.weight")


def _take_head_norms(config: DecoderConfig, weights: Weights, prefix: str) -> HeadNorms:
    queries, keys = (take_norm(config, weights, f"{prefix}{name}.weight") for name in HEAD_NORMS)
    return HeadNorms(queries, keys, config.heads, config.kv_heads)


def _take_feed(config: DecoderConfig, weights: Weights, index: int) -> FeedForward:
    prefix = layer_prefix(index)
    norm = take_norm(config, weights, f"{prefix}{norms_of(config).mlp}.weight")
    return take_feed(config, weights, prefix, norm, routed=is_routed(config, index))


def take_feed(
    config: DecoderConfig, weights: Weights, prefix: str, norm: Norm, *, routed: bool
) -> FeedForward:
    """Take the weights of a layer's feed-forward but for the norm before it.

    Raises:
        InvalidModel: experts are packed unlike each other.
    """
    if routed and config.experts is not None:
        return _take_experts(config.experts, weights, prefix, norm)
    return Dense(
        norm=norm,
        gate_up=weights.linear([prefix + name for name in GATED], has_bias=config.mlp_bias),
        down=weights.linear([prefix + DOWN], has_bias=config.mlp_bias),
        width=config.mlp,
        activation=config.activation,
        output_norm=_take_optional(config, weights, prefix, norms_of(config).mlp_output),
    )


def _take_experts(config: ExpertsConfig, weights: Weights, prefix: str, norm: Norm) -> Experts:
    return Experts(
        config=config,
        norm=norm,
        router=weights.linear([prefix + config.router], has_bias=config.biased),
        gate_up=_take_stack(config, weights, prefix, EXPERT_GATED, fused=FUSED_GATED),
        down=_take_stack(config, weights, prefix, (EXPERT_DOWN,), fused=FUSED_DOWN),
        shared=None if config.shared is None else _take_shared(config.shared, weights, prefix),
        correction=weights.take_float32(f"{prefix}{CORRECTION}") if config.corrected else None,
    )


def _take_stack(
    config: ExpertsConfig, weights: Weights, prefix: str, names: tuple[str, ...], *, fused: str
) -> ExpertProjection:
    if config.fused and weights.has(f"{prefix}{fused}.weight"):
        return weights.experts([Stack(prefix + fused, ())])
    stacks = [expert_stack(prefix, name, config) for name in names]
    return weights.experts(stacks, has_bias=config.biased)


def _take_shared(config: SharedConfig, weights: Weights, prefix: str) -> Shared:
    module = f"{prefix}mlp.{config.name}"
    return Shared(
        gate_up=weights.linear([f"{module}.{name}" for name in EXPERT_GATED]),
        down=weights.linear([f"{module}.{EXPERT_DOWN}"]),
        width=config.mlp,
        gate=weights.linear([f"{module}_gate"]) if config.gated else None,
    )
