"""A decoder that keeps latents: DeepSeek-V2 and V3, GLM-4-MoE-lite, told apart by config alone."""

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlxd_models.families.common.decoder import layer_prefix, norms_of
from mlxd_models.families.latent.config import LatentConfig
from mlxd_models.families.latent.tensors import OUTPUT
from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.latent import LatentCache
from mlxd_worker.models.base import Batch, plan_pass
from mlxd_worker.models.capabilities import Capabilities
from mlxd_worker.models.families.latent_attention import LatentAttention, take_latent_attention
from mlxd_worker.models.layers.llama_layers import (
    Decoder,
    FeedForward,
    Rotation,
    rotation_of,
    take_feed,
    take_norm,
)
from mlxd_worker.models.weights.fused import add_projection
from mlxd_worker.models.weights.linear import Projection, Weighted
from mlxd_worker.models.weights.reader import Reader


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


build = LatentModel
