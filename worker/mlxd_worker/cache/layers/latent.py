"""The latent cache: one entry a position, for all heads, whose first values are the values as well.

Invariants:
- An arena is one array `[slots, 1, capacity, entry_dim]`; position p of a row is column p. Queries
  are compared with whole entries and read the first `latent_dim` values of these.
- Values are never stored: where a pass reads them they are a view of the entries, made of the array
  that has been written, and it dies with the step.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import StepPlan
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.store import Part, SliceableCache


class LatentCache(SliceableCache):
    """One layer's latents. One owner: the engine thread."""

    def __init__(self, *, entry_dim: int, latent_dim: int, dtype: mx.Dtype) -> None:
        """Return a cache without arenas, of entries whose first `latent_dim` values are read."""
        self.latent_dim = latent_dim
        super().__init__(Kind.LATENT, [Part("latents", 1, entry_dim, dtype)])

    def attend(
        self, queries: mx.array, entries: mx.array, plan: StepPlan, *, scale: float
    ) -> mx.array:
        """Write entries `[N, 1, width, entry_dim]`; return what the queries read of latents.

        `queries` are `[N, heads, width, entry_dim]`, the result `[N, heads, width, latent_dim]`, in
        the batch's order, lazy.
        """
        return self._attend(Asked(queries, entries, entries, plan, scale), [entries])

    def _keys_and_values(self, seen: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        return seen[0], seen[0][..., : self.latent_dim]
