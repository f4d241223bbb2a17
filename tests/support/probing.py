"""A model that remembers the logits it gave: what a lone run's draws were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.models.base import Batch, Capabilities, Model


class Probe:
    """The model it is given, step for step; keeps every row of logits that it hands out."""

    def __init__(self, inner: Model) -> None:
        self._inner = inner
        self.capabilities = Capabilities()
        self._arrays: list[mx.array] = []

    @property
    def vocab_size(self) -> int:
        """The inner model's."""
        return self._inner.vocab_size

    @property
    def context_max(self) -> int:
        """The inner model's."""
        return self._inner.context_max

    @property
    def dtype(self) -> mx.Dtype:
        """The inner model's."""
        return self._inner.dtype

    @property
    def attention(self) -> Sequence[AttentionGeometry | None]:
        """The inner model's."""
        return self._inner.attention

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return the inner model's."""
        return self._inner.new_caches(kv=kv, context_max=context_max)

    def forward(self, batch: Batch, caches: Any) -> mx.array:
        """Run the inner model."""
        return self._inner.forward(batch, caches)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the inner model's, and keep them."""
        self._arrays.append(self._inner.logits(hidden))
        return self._arrays[-1]

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the inner model's."""
        return self._inner.parameters()

    def rows(self) -> list[NDArray[np.float32]]:
        """Return each row of logits given so far, float32 [V], in order; forgets them."""
        arrays, self._arrays = self._arrays, []
        return [row for array in arrays for row in np.array(array)]
