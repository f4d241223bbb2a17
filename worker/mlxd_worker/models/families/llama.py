"""The Llama family: Llama 2 and 3, SmolLM, Mistral; and, by their configs, its kin.

Invariants:
- What sets a family apart is in its config and its layers' parts, not in a model of its own.
- Rows are flat `[rows * width, hidden]` everywhere but inside attention.
- No `mx.compile`: on a CPU it needs a compiler, for a tenth; for CUDA a step is compiled whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_worker.cache.arenas.plan import PassCaches, StepPlan
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kinds import AttentionCache, AttentionGeometry, as_attention
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.kernels.decode_attention import serves
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Batch, Capabilities, plan_pass
from mlxd_worker.models.layers.llama_layers import (
    Decoder,
    Layer,
    rotations_of,
    take_layer,
    take_norm,
)
from mlxd_worker.models.weights.fused import add_projection, normed_times
from mlxd_worker.models.weights.pacing import traced_tokens_max
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class _Pass:
    """One batch of those that go through the layers together."""

    batch: Batch
    plan: StepPlan


class LlamaModel(Decoder[Layer]):
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: DecoderConfig, weights: Reader) -> None:
        self.config = config
        rotations = rotations_of(
            [config.rope_of(index) for index in range(config.layers)], config.head_dim
        )
        super().__init__(
            config,
            weights,
            (take_layer(config, weights, at, rotation) for at, rotation in enumerate(rotations)),
            partial(take_norm, config, weights),
            rotations=rotations,
            attention=[
                AttentionGeometry(kv_heads=config.kv_heads, head_dim=config.head_dim, window=window)
                for window in config.windows
            ],
        )
        kinds = [rotation.config for rotation in rotations]
        # The kernel that rotates as it writes knows one number a token, and halves of heads.
        self._in_place = not any(kind.interleaved for kind in kinds) and not config.sinks
        most = self._packed_rows_max
        self.capabilities = Capabilities(
            # On a CPU experts may look at their choice.
            stays_lazy=config.experts is None or not runs_cpu(),
            # Packed weights are unpacked a few layers at a time.
            joins_passes=most is None,
            flat_tokens_max=traced_tokens_max(most),
            reads_chunks=True,
            turns_apart=any(kind.sections for kind in kinds),
            decodes_in_place=self._in_place
            and serves(
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                dtype=self.dtype,
            ),
        )

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return hidden rows, normalised, lazy."""
        return self.forward_joined([batch], caches)[0]

    def forward_joined(self, batches: Sequence[Batch], caches: PassCaches) -> list[mx.array]:
        """Do `forward` for several batches; their rows are together in all products."""
        passes = [_Pass(batch, plan_pass(batch, caches, self.dtype)) for batch in batches]
        ids = _together([its.batch.tokens.reshape(-1) for its in passes])

        def do_layer(layer: Layer, cache: LayerCache | None, rows: mx.array) -> mx.array:
            read = self._attend(layer, rows, as_attention(cache), passes)
            return layer.feed(add_projection(rows, read, layer.output, layer.output_norm))

        is_wide = any(its.batch.width > 1 or its.batch.counts for its in passes)
        inlays = batches[0].inlays
        assert len(batches) == 1 or not any(its.inlays for its in batches), "never joined"
        return _apart(self._run(ids, caches, do_layer, is_wide=is_wide, inlays=inlays), passes)

    def _attend(
        self, layer: Layer, rows: mx.array, cache: AttentionCache, passes: Sequence[_Pass]
    ) -> mx.array:
        """Return what the rows read, before the output projection."""
        config, first = self.config, passes[0]
        joined = normed_times(rows, layer.attention_norm, layer.qkv)
        if layer.head_norms is not None:
            joined = layer.head_norms(joined)
        in_place = first.plan.in_place and self._in_place
        if in_place and isinstance(cache, KVCache) and cache.attends_joined(heads=config.heads):
            periods = first.plan.share(("periods", id(layer.rotation)), layer.rotation.periods)
            return cache.attend_joined(
                joined, periods, first.plan, heads=config.heads, scale=layer.scale
            )
        parts = _apart(joined, passes)
        heads = [self._project(layer, part, its) for part, its in zip(parts, passes, strict=True)]
        if len(heads) == 1:
            read = [cache.attend(heads[0])]
        else:
            assert isinstance(cache, KVCache), "passes are joined over standard caches alone"
            read = cache.attend_joined_passes(heads)
        width = config.heads * config.head_dim
        return _together([part.transpose(0, 2, 1, 3).reshape(-1, width) for part in read])

    def _project(self, layer: Layer, joined: mx.array, its: _Pass) -> Asked:
        """Return one pass's rotated queries and keys, and its values."""
        config = self.config
        heads = config.heads + 2 * config.kv_heads
        split = joined.reshape(-1, its.batch.width, heads, config.head_dim).transpose(0, 2, 1, 3)
        # Queries and keys rotate alike: one call for both.
        rotating = config.heads + config.kv_heads
        rotated = layer.rotation(split[:, :rotating], its.batch.turned, its.plan)
        queries, keys = rotated[:, : config.heads], rotated[:, config.heads :]
        return Asked(queries, keys, split[:, rotating:], its.plan, layer.scale, layer.sinks)


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


build = LlamaModel
