"""The parts of Llama-like decoders: rotations, layers, both ends; and what models of them share.

Invariants:
- Queries, keys and values come from one product, gate and up from another: their weights are joined
  while loading, and the separate ones are never kept.
- What a layer does with each row by itself takes and returns the residual rows `[M, hidden]`, norms
  included.
- A rotation's gain on queries and on keys is in the scale of their products, not in the rotation.
- A head that is the embedding is kept once, and named once.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import mlx.core as mx

from mlxd_models.families.common.decoder import (
    ATTENTION,
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    GATED,
    HEAD,
    HEAD_NORMS,
    SINKS,
    Activation,
    DecoderConfig,
    is_routed,
    layer_prefix,
    norms_of,
)
from mlxd_models.families.common.rope import RopeConfig
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches, StepPlan
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.base import Inlay
from mlxd_worker.models.layers.experts import Experts, take_experts
from mlxd_worker.models.weights.fused import add_projection, gate_projection, logits_of
from mlxd_worker.models.weights.linear import (
    Projection,
    Weighted,
    named_arrays,
    packed_rows_least,
)
from mlxd_worker.models.weights.pacing import LayerPacer
from mlxd_worker.models.weights.reader import Reader

_EMBEDDING, _HEAD = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Rotation:
    """One way to rotate the first `dims` values of a head."""

    config: RopeConfig
    dims: int
    table: mx.array | None
    """Each pair's tokens per radian, float32; None where the base alone says it."""

    def __call__(self, heads: mx.array, offsets: mx.array, plan: StepPlan) -> mx.array:
        """Rotate `[N, heads, width, head_dim]`; row i's first position is `offsets[i]`; lazy.

        offsets: int32 [N]; or [3, N, width], each token's place on three axes (`config.sections`).
        plan: of the pass, in which all layers share the angles where MLX would make them anew.
        """
        if offsets.ndim == 1 and self._uses_fused(heads):
            return mx.fast.rope(
                heads,
                self.dims,
                traditional=self.config.interleaved,
                base=self.config.base if self.table is None else None,
                scale=self.config.position_scale,
                offset=offsets,
                freqs=self.table,
            )
        if self.dims < heads.shape[-1]:
            turned = self(heads[..., : self.dims], offsets, plan)
            return mx.concatenate([turned, heads[..., self.dims :]], axis=-1)
        count, width, half = heads.shape[0], heads.shape[2], self.dims // 2
        angles = partial(self._angles, offsets, width)
        cosines, sines = (
            plan.share((name, id(self)), lambda turn=turn: turn(angles()))  # type: ignore[misc]
            for name, turn in (("cosines", mx.cos), ("sines", _signed_sines))
        )
        pairs = heads.reshape(count, -1, width, 2, half)
        turned = pairs * cosines + pairs[..., ::-1, :] * sines
        return turned.astype(heads.dtype).reshape(heads.shape)

    def _uses_fused(self, heads: mx.array) -> bool:
        """Tell whether MLX is to do it: on a CPU it takes it apart for each layer anew."""
        plain = self.dims == heads.shape[-1] and not self.config.interleaved
        return not (plain and runs_cpu() and heads.dtype == mx.float32)

    def _angles(self, offsets: mx.array, width: int) -> mx.array:
        """Return by how many radians pairs turn, `[N, 1, width, 1, dims / 2]`."""
        if offsets.ndim == 1:
            positions = (offsets[:, None] + mx.arange(width, dtype=offsets.dtype))[..., None]
        else:
            assert self.config.sections is not None, "no other model's tokens stand on three axes"
            axis_of = mx.array(self.config.axes)
            positions = mx.moveaxis(mx.take(offsets, axis_of, axis=0), 0, -1)
        return (positions.astype(mx.float32) / self.periods())[:, None, :, None]

    def periods(self) -> mx.array:
        """Return by how many positions each pair turns by one radian, lazy."""
        periods = self.table
        if periods is None:
            steps = mx.arange(0, self.dims, 2, dtype=mx.float32)
            periods = mx.exp(steps * (math.log(self.config.base) / self.dims))
        return periods / self.config.position_scale


def _signed_sines(angles: mx.array) -> mx.array:
    """Return what the other value of a pair counts with, `[..., 2, dims / 2]`."""
    sines = mx.sin(angles)
    return mx.concatenate([-sines, sines], axis=-2)


def rotation_of(config: RopeConfig, dims: int) -> Rotation:
    """Return the rotation that a config asks for."""
    periods = config.periods(dims)
    table = None if periods is None else mx.array(periods, dtype=mx.float32)
    return Rotation(config, dims, table)


def rotations_of(configs: Sequence[RopeConfig], dims: int) -> tuple[Rotation, ...]:
    """Return one for each config, the same object for equal ones."""
    rotations = {config: rotation_of(config, dims) for config in dict.fromkeys(configs)}
    return tuple(rotations[config] for config in configs)


def tables_of(rotations: Sequence[Rotation]) -> Mapping[str, mx.array]:
    """Return their tables by name, each once."""
    tables = {id(its.table): its.table for its in rotations if its.table is not None}
    return {
        f"rope_periods.{index}" if index else "rope_periods": table
        for index, table in enumerate(tables.values())
    }


@dataclass(frozen=True, slots=True)
class Dense(Weighted):
    """One network for all rows."""

    norm: Norm
    gate_up: Projection
    down: Projection
    width: int
    activation: Activation = Activation.SILU
    output_norm: Norm | None = None

    def __call__(self, rows: mx.array) -> mx.array:
        """Return the rows with what it makes of them added."""
        inner = gate_projection(
            rows, self.norm, self.gate_up, width=self.width, activation=self.activation
        )
        return add_projection(rows, inner, self.down, self.output_norm)


FeedForward = Dense | Experts
"""The second half of a layer: returns the rows with what it makes of them added."""


@dataclass(frozen=True, slots=True)
class HeadNorms(Weighted):
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
class Layer(Weighted):
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


def take_layer(config: DecoderConfig, weights: Reader, index: int, rotation: Rotation) -> Layer:
    """Take one layer's weights."""
    prefix, norms = layer_prefix(index), norms_of(config)
    mlp_norm = take_norm(config, weights, f"{prefix}{norms.mlp}.weight")
    return Layer(
        attention_norm=take_norm(config, weights, f"{prefix}{norms.attention}.weight"),
        qkv=weights.linear([prefix + name for name in ATTENTION], has_bias=config.qkv_bias),
        head_norms=_take_head_norms(config, weights, prefix) if config.head_norms else None,
        rotation=rotation,
        scale=config.scale * rotation.config.gain**2,
        sinks=weights.take(prefix + SINKS) if config.sinks else None,
        output=weights.linear([f"{prefix}self_attn.o_proj"], has_bias=config.output_bias),
        output_norm=_take_optional(config, weights, prefix, norms.attention_output),
        feed=take_feed(config, weights, index, mlp_norm),
    )


def take_norm(config: DecoderConfig, weights: Reader, name: str) -> Norm:
    """Take a norm, such that its weight is what the normalised values are multiplied by."""
    weight = weights.take(name)
    if config.norms_from_one:
        weight = 1 + weight
        mx.eval(weight)
    return Norm(weight, config.norm_eps)


def _take_optional(
    config: DecoderConfig, weights: Reader, prefix: str, name: str | None
) -> Norm | None:
    return None if name is None else take_norm(config, weights, f"{prefix}{name}.weight")


def _take_head_norms(config: DecoderConfig, weights: Reader, prefix: str) -> HeadNorms:
    queries, keys = (take_norm(config, weights, f"{prefix}{name}.weight") for name in HEAD_NORMS)
    return HeadNorms(queries, keys, config.heads, config.kv_heads)


def take_feed(config: DecoderConfig, weights: Reader, index: int, norm: Norm) -> FeedForward:
    """Take the weights of a layer's feed-forward but for the norm before it."""
    prefix = layer_prefix(index)
    if config.experts is not None and is_routed(config, index):
        return take_experts(config.experts, weights, prefix, norm)
    return Dense(
        norm=norm,
        gate_up=weights.linear([prefix + name for name in GATED], has_bias=config.mlp_bias),
        down=weights.linear([prefix + DOWN], has_bias=config.mlp_bias),
        width=config.mlp,
        activation=config.activation,
        output_norm=_take_optional(config, weights, prefix, norms_of(config).mlp_output),
    )


def lay_in(rows: mx.array, inlays: Sequence[Inlay]) -> mx.array:
    """Return rows `[M, hidden]` in which inlays, in order, have taken their places; lazy."""
    parts, done = [], 0
    for inlay in inlays:
        first = inlay.level(0, rows.shape[-1])
        parts += [rows[done : inlay.start], first.astype(rows.dtype)]
        done = inlay.start + inlay.rows.shape[0]
    return mx.concatenate([*parts, rows[done:]], axis=0)


def add_level(rows: mx.array, inlays: Sequence[Inlay], level: int) -> mx.array:
    """Return rows `[M, hidden]` to which a level of inlays is added at their places; lazy."""
    parts, done = [], 0
    for inlay in inlays:
        stop = inlay.start + inlay.rows.shape[0]
        more = inlay.level(level, rows.shape[-1]).astype(rows.dtype)
        parts += [rows[done : inlay.start], rows[inlay.start : stop] + more]
        done = stop
    return mx.concatenate([*parts, rows[done:]], axis=0)


_Layer = TypeVar("_Layer", bound=Weighted)


class Decoder(Generic[_Layer]):
    """A loaded model but for what its layers do. One owner: the engine thread."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Reader,
        layers: Iterable[_Layer],
        take_norm: Callable[[str], Norm],
        *,
        rotations: Sequence[Rotation],
        attention: Sequence[AttentionGeometry | None],
    ) -> None:
        """Take all weights, a layer's as `layers` yields it; nothing else keeps them.

        attention: what each layer remembers of keys and values; None where it keeps other things.
        """
        self._decoder = config
        self._tables = tables_of(rotations)
        self.attention = attention
        self._embedding = weights.linear([_EMBEDDING])
        self._layers = tuple(layers)
        self._norm = take_norm(FINAL_NORM)
        self._head = self._embedding if config.tied_head else weights.linear([_HEAD])
        self._packed_rows_max = packed_rows_least(self._layers)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._decoder.vocab

    @property
    def context_max(self) -> int:
        """The most tokens a row may hold."""
        return self._decoder.context_max

    @property
    def dtype(self) -> mx.Dtype:
        """The weights' type."""
        return self._embedding.dtype

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches, one a layer: of attention in form `kv`, where that is kept."""
        longest = self.context_max if context_max is None else context_max
        return [
            None if geometry is None else geometry.new_cache(self.dtype, kv=kv, context_max=longest)
            for geometry in self.attention
        ]

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [M, vocab] for normalised rows, lazy."""
        logits, cap = logits_of(hidden, self._head), self._decoder.logits_cap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {FINAL_NORM: self._norm.weight} | named_arrays(_EMBEDDING, self._embedding)
        if self._head is not self._embedding:
            named |= named_arrays(_HEAD, self._head)
        named |= self._tables
        for index, layer in enumerate(self._layers):
            named |= named_arrays(f"layers.{index}", layer)
        return named

    def _run(
        self,
        ids: mx.array,
        caches: PassCaches,
        do_layer: Callable[[_Layer, LayerCache | None, mx.array], mx.array],
        *,
        is_wide: bool,
        inlays: Sequence[Inlay] = (),
    ) -> mx.array:
        """Return the rows [M, hidden] of token ids [M] after all layers, normalised, lazy.

        is_wide: whether a row has several of these tokens. inlays: what takes the places of some.
        """
        rows, scale = self._embedding.lookup(ids), self._decoder.embedding_scale
        rows = rows if scale == 1.0 else rows * scale
        levels = inlays[0].levels(rows.shape[-1]) if inlays else 0
        if inlays:
            rows = lay_in(rows, inlays)
        most = self._packed_rows_max
        pacer = LayerPacer(unpacks=is_wide and most is not None and rows.shape[0] > most)
        for index, (layer, cache) in enumerate(zip(self._layers, caches.layers, strict=True)):
            rows = do_layer(layer, cache, rows)
            if index < levels:
                rows = add_level(rows, inlays, index + 1)
            pacer.follow(index, rows)
        return mx.fast.rms_norm(rows, self._norm.weight, self._norm.eps)
