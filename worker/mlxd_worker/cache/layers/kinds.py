"""Which cache an attention layer gets, and what a model may ask of any of them.

Invariants:
- A model never names a cache's class: it states each layer's geometry, and `new_cache` chooses.
- A window as long as the longest row counts as none: such a layer remembers everything, so that its
  entries can be kept and shared range by range.
- A layer with a window is never quantised, whatever the format: its ring does not grow, and the
  format is for layers that do. The fit assumes the same.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.sizes.arena_sizes import CAPACITY_MIN
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.latent import LatentCache
from mlxd_worker.cache.layers.quantized import QuantizedKVCache
from mlxd_worker.cache.layers.rotating import RotatingCache

AttentionCache = KVCache | QuantizedKVCache | RotatingCache
"""A layer's cache that attention reads and writes."""


def as_attention(cache: LayerCache | None) -> AttentionCache:
    """Return an attention layer's cache, with its type; engine thread, every step.

    Raises:
        TypeError: a bug: the layer has no cache, or a recurrent one.
    """
    if not isinstance(cache, AttentionCache):
        raise TypeError(f"{type(cache).__name__} is not an attention layer's cache")
    return cache


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """What one attention layer remembers of a position, and of how many positions."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    """Positions that a query sees, its own among them; None: all before it."""
    latent_dim: int | None = None
    """Values are this many leading values of the keys; None: they are stored separately."""
    value_dim: int | None = None
    """The values' own width; None: the keys'."""

    def new_cache(self, dtype: mx.Dtype, *, kv: KVFormat, context_max: int) -> LayerCache:
        """Return an empty cache for this layer, of rows of up to `context_max` tokens.

        `kv` has no effect on a layer with a window. Values of another width are never quantised.
        """
        heads, dim, value_dim, window = self.kv_heads, self.head_dim, self.value_dim, self.window
        if self.latent_dim is not None:
            assert kv is KVFormat.MODEL, "the load refuses others for latents"
            return LatentCache(entry_dim=dim, latent_dim=self.latent_dim, dtype=dtype)
        # No arena holds more than the context rounded up.
        capacity_max = -(-context_max // CAPACITY_MIN) * CAPACITY_MIN
        if window is not None and window < capacity_max:
            return RotatingCache(
                kv_heads=heads, head_dim=dim, value_dim=value_dim, window=window, dtype=dtype
            )
        if window is None and kv is not KVFormat.MODEL:
            return QuantizedKVCache(kv_heads=heads, head_dim=dim, dtype=dtype, kv=kv)
        return KVCache(kv_heads=heads, head_dim=dim, value_dim=value_dim, dtype=dtype)
