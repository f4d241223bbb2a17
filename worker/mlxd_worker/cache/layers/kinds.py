"""Which cache an attention layer gets, and what a model may ask of any of them.

Invariants:
- A model never names a cache's class: it states each layer's geometry, and `attention_cache`
  chooses.
- A window as long as the longest row is no window: such a layer remembers everything, so that its
  entries can be kept and shared range by range.
- A layer with a window is never quantised, whatever the format: its ring does not grow, and the
  format is for the layers that do. The fit reckons so too.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxd_models.sizes.arena_sizes import CAPACITY_MIN
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.latent import LatentCache
from mlxd_worker.cache.layers.quantized import QuantizedKVCache
from mlxd_worker.cache.layers.rotating import RotatingCache


class AttentionCache(LayerCache, Protocol):
    """A layer's cache that attention reads and writes."""

    def attend(self, asked: Asked) -> mx.array:
        """Write keys and values; return what the queries read, in their shape and order."""


_ATTENTION = (KVCache, QuantizedKVCache, RotatingCache)


def attention_cache(
    *,
    kv_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    window: int | None,
    kv: KVFormat,
    context_max: int,
    value_dim: int | None = None,
) -> AttentionCache:
    """Return an empty cache for one layer, of rows of up to `context_max` tokens.

    `kv` says nothing to a layer with a window. Values of another width are never quantised.
    """
    # No arena holds more than the context rounded up.
    capacity_max = -(-context_max // CAPACITY_MIN) * CAPACITY_MIN
    if window is not None and window < capacity_max:
        return RotatingCache(
            kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, window=window, dtype=dtype
        )
    if window is None and kv is not KVFormat.MODEL:
        return QuantizedKVCache(kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, kv=kv)
    return KVCache(kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype)


def as_attention(cache: LayerCache | None) -> AttentionCache:
    """Return the cache of an attention layer as what it is; engine thread, every step.

    Raises:
        TypeError: a bug: the layer has no state, or a recurrent one.
    """
    if not isinstance(cache, _ATTENTION):
        raise TypeError(f"{type(cache).__name__} is not an attention layer's cache")
    return cache


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """What one attention layer remembers of a position, and of how many."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    """Positions that a query sees, its own among them; None: all before it."""
    latent_dim: int | None = None
    """Values are the first so many of the keys' own; None: they are stored beside them."""
    value_dim: int | None = None
    """The values' own width; None: the keys'."""

    def new_cache(self, dtype: mx.Dtype, *, kv: KVFormat, context_max: int) -> LayerCache:
        """Return an empty cache for this layer, of rows of up to `context_max` tokens."""
        if self.latent_dim is not None:
            assert kv is KVFormat.MODEL, "the load refuses others for latents"
            return LatentCache(entry_dim=self.head_dim, latent_dim=self.latent_dim, dtype=dtype)
        return attention_cache(
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            window=self.window,
            kv=kv,
            context_max=context_max,
        )
