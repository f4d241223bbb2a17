"""Rows of numbered tokens in one layer, whose queries tell which tokens they saw.

The tokens' keys are zero, so that a query weighs all it sees alike, and their values are unit
vectors: a query's result tells exactly which tokens it saw, a row's contents which it holds and in
which order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.kept.stacks import LayerState
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.rotating import RotatingCache
from mlxd_worker.cache.rows import RowCaches

TOKENS = 256
"""Numbers a token may have: the width of a head."""

ROW, OTHER = RowId(1), RowId(2)


class Numbered:
    """One attention layer with one head; rows of numbered tokens."""

    def __init__(self, layer: KVCache | RotatingCache) -> None:
        """Take an empty cache over and let `ROW` join."""
        self.layer = layer
        self.caches = RowCaches([layer], context_max=1024, rows_max=4)
        self.join(ROW)

    @property
    def contents(self) -> RowContents:
        """What the rows hold."""
        return self.caches.contents

    def join(self, row: RowId) -> None:
        """Let a row join with plenty of room."""
        assert self.caches.join(row, tokens=512)

    def write(self, tokens: Iterable[int], row: RowId = ROW) -> list[list[int]]:
        """Write tokens in one pass; return which tokens each one's query saw."""
        numbers = list(tokens)
        offset = self.contents.offset(row)
        plan = self.caches.plan(
            (row,),
            offsets=mx.array([offset], dtype=mx.int32),
            lengths=(offset + len(numbers),),
            width=len(numbers),
            dtype=mx.float32,
        )
        values = mx.eye(TOKENS)[mx.array(numbers)][None, None]
        nothing = mx.zeros_like(values)
        read = self.layer.attend(Asked(nothing, nothing, values, plan, 1.0))
        mx.eval(read, self.caches.state())
        self.contents.settle(row)
        return [np.flatnonzero(query > 1e-6).tolist() for query in np.array(read[0, 0])]

    def decode(self, tokens: Iterable[int], row: RowId = ROW) -> list[int]:
        """Write tokens one a pass; return what the last one's query saw."""
        return [self.write([token], row)[0] for token in tokens][-1]

    def list_held(self, row: RowId = ROW) -> list[int]:
        """Return the tokens in the row's memory, in order."""
        place = self.caches.table.place(row)
        return numbers_of(self.layer.read(place, 0, self.contents.offset(row)))

    def keep(self, start: int, row: RowId = ROW) -> Snapshot:
        """Return a snapshot of the row."""
        snapshot = self.contents.snapshot(row, self.layer.kind, start)
        assert snapshot is not None
        return snapshot


def numbers_of(state: LayerState) -> list[int]:
    """Return the tokens in a layer's state, in order."""
    _, values = state
    return [int(number) for number in np.array(values[0, 0]).argmax(axis=-1)]


def union(seen: Sequence[Sequence[int]]) -> list[int]:
    """Return all tokens that any query saw."""
    return sorted({token for one in seen for token in one})


def sliding(window: int) -> Numbered:
    """Return a sliding window."""
    return Numbered(RotatingCache(kv_heads=1, head_dim=TOKENS, window=window, dtype=mx.float32))


def standard() -> Numbered:
    """Return a cache that remembers everything."""
    return Numbered(KVCache(kv_heads=1, head_dim=TOKENS, dtype=mx.float32))
