"""A decoder that keeps latents: DeepSeek-V2 and V3, GLM-4-MoE-lite, by their configs.

Invariants:
- What sets a family apart is in its config, not in a model of its own.
- Rows are flat `[rows * width, hidden]` everywhere but inside attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.common.decoder import FINAL_NORM, is_routed, layer_prefix, norms_of
from mlxd_models.families.latent.config import LatentConfig
from mlxd_models.families.latent.tensors import OUTPUT
from mlxd_models.sizes.weight_forms import UNPACKED_LAYERS
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.latent import as_latent
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.base import Batch, attention_caches, plan_pass
from mlxd_worker.models.building import Weights
from mlxd_worker.models.capabilities import Capabilities
from mlxd_worker.models.families.latent_attention import LatentAttention, take_latent_attention
from mlxd_worker.models.layers.llama_layers import (
    FeedForward,
    Rotation,
    rotation_of,
    tables_of,
    take_embedding,
    take_ends,
    take_feed,
)
from mlxd_worker.models.weights.fused import add_projection
from mlxd_worker.models.weights.linear import Projection, is_packed, named_arrays, packed_rows_max


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    attention: LatentAttention
    output: Projection
    feed: FeedForward

    @property
    def packed(self) -> bool:
        """Whether weights that stay packed may be unpacked for many rows."""
        return self.attention.packed or is_packed(self.output) or self.feed.packed

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once."""
        named = dict(self.attention.arrays()) | named_arrays("output", self.output)
        return named | dict(self.feed.arrays())


class LatentModel:
    """A loaded model. One owner: the engine thread."""

    def __init__(self, config: LatentConfig, weights: Weights) -> None:
        """Take all weights; nothing else keeps them."""
        self.config = config
        decoder = config.decoder
        embedding = take_embedding(weights)
        self._rotation = rotation_of(decoder.rope, config.rotary_dim)
        self._layers = tuple(
            _take_layer(config, weights, index, self._rotation) for index in range(decoder.layers)
        )
        norm = Norm(weights.take(FINAL_NORM), decoder.norm_eps)
        self._ends = take_ends(weights, embedding, norm, tied_head=decoder.tied_head)
        self._packed = any(layer.packed for layer in self._layers)
        self.capabilities = Capabilities()

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
    def attention(self) -> tuple[AttentionGeometry, ...]:
        """Each layer's latents: what all heads' keys and values are made of."""
        config = self.config
        geometry = AttentionGeometry(1, config.entry_dim, latent_dim=config.rank)
        return (geometry,) * config.decoder.layers

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches, one a layer."""
        return attention_caches(self, kv=kv, context_max=context_max)

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return hidden rows, normalised, lazy."""
        plan = plan_pass(batch, caches, self.dtype)
        rows = self._ends.embed(batch.tokens)
        # A GPU holds what is unpacked until it is done: not of all layers at once.
        unpacks = self._packed and batch.width > 1 and rows.shape[0] > packed_rows_max()
        for index, (layer, cache) in enumerate(zip(self._layers, caches.layers, strict=True)):
            read = layer.attention(rows, batch.offsets, as_latent(cache), plan)
            rows = layer.feed(add_projection(rows, read, layer.output))
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
            named |= {f"layers.{index}.{name}": array for name, array in layer.arrays().items()}
        return named


def _take_layer(config: LatentConfig, weights: Weights, index: int, rotation: Rotation) -> Layer:
    prefix, decoder = layer_prefix(index), config.decoder
    attention = take_latent_attention(config, weights, prefix, rotation)
    output = weights.linear([prefix + OUTPUT], has_bias=decoder.output_bias)
    norm = Norm(weights.take(f"{prefix}{norms_of(decoder).mlp}.weight"), decoder.norm_eps)
    feed = take_feed(decoder, weights, prefix, norm, routed=is_routed(decoder, index))
    return Layer(attention, output, feed)


build = LatentModel
