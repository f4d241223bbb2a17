"""Passes whose weights are unpacked, a few layers at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from mlxd_models.sizes.weight_forms import UNPACKED_LAYERS
from mlxd_shared.config import PREFILL_CHUNK_TOKENS
from mlxd_worker.cache.layers.tokens import TOKEN_SIZES

LAYERS_TOGETHER: Final = UNPACKED_LAYERS // 2
"""Layers that are computed while as many are put together."""


def traced_tokens_max(packed_rows_max: int | None) -> int:
    """Return up to how many tokens of prompts a pass is traced with; 0: none is.

    packed_rows_max: how many rows stay packed; None: nothing is unpacked. Where that is less than a
    chunk's tokens, prompts are read faster together, by weights that are unpacked once for all.
    """
    if packed_rows_max is None:
        return TOKEN_SIZES[-1]
    return packed_rows_max if packed_rows_max >= PREFILL_CHUNK_TOKENS else 0


class LayerPacer:
    """Evaluates layers as they come: a device holds what is unpacked until it is done with it.

    It has work meanwhile: as many layers are under way as are put together.
    """

    def __init__(
        self,
        *,
        unpacks: bool,
        begin: Callable[[mx.array], None] = mx.async_eval,
        finish: Callable[[mx.array], None] = mx.eval,
    ) -> None:
        """unpacks: whether there is anything to do. begin, finish: how MLX computes an array."""
        self._unpacks = unpacks
        self._begin = begin
        self._finish = finish
        self._before: mx.array | None = None

    def follow(self, index: int, rows: mx.array) -> None:
        """Take what the layer of an index, from 0 on, has made of the rows; may wait for others."""
        if not self._unpacks or (index + 1) % LAYERS_TOGETHER:
            return
        self._begin(rows)
        if self._before is not None:
            self._finish(self._before)
        self._before = rows
