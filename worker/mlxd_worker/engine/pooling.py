"""A prompt's vector, gathered while its chunks are evaluated.

Invariants:
- Sums are float32, whatever the model computes in, and what is kept is one row: never a view of a
  chunk's hidden rows, which would keep them all.
- How a prompt is cut into chunks changes a vector by rounding alone.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlxd_shared.domain.requests import Pooling


class Pool:
    """One prompt's. One owner: the engine thread."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._held: mx.array | None = None

    def take_states(self, hidden: mx.array) -> mx.array:
        """Take the hidden rows [tokens, hidden] of the next chunk; return what to evaluate."""
        if self._pooling is Pooling.LAST_TOKEN:
            self._held = mx.contiguous(hidden[-1].astype(mx.float32))
        else:
            total = mx.sum(hidden.astype(mx.float32), axis=0)
            self._held = total if self._held is None else self._held + total
        return self._held

    def vector(self, tokens: int) -> tuple[float, ...]:
        """Return the vector of the whole prompt, which has so many tokens.

        Raises:
            ArithmeticError: the model's states are not numbers.
        """
        assert self._held is not None, "nothing has been evaluated"
        whole = self._held / tokens if self._pooling is Pooling.MEAN else self._held
        values: list[float] = whole.tolist()  # type: ignore[assignment]
        if not all(map(math.isfinite, values)):
            raise ArithmeticError("the model's hidden states are not numbers")
        return tuple(values)
