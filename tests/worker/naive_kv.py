"""The standard cache beside every row's whole history: contents tell their row and position."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.shapes import AttentionShape
from mlxd_worker.cache.rows import RowCaches
from tests.worker.cache.pass_shapes import shapes_of

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5
CONTEXT_MAX = 1024
ROWS_MAX = 5


@dataclass
class Naive:
    """Every row's whole history of keys and values, one array a row, nothing clever."""

    caches: RowCaches
    keys: dict[RowId, mx.array] = field(default_factory=dict)
    values: dict[RowId, mx.array] = field(default_factory=dict)
    written: int = 0
    shapes: set[AttentionShape] = field(default_factory=set)
    """What was read where shapes are bounded."""

    def kv_cache(self) -> KVCache:
        """Return the cache under test."""
        layer = self.caches.layers[0]
        assert isinstance(layer, KVCache)
        return layer

    def length(self, row: RowId) -> int:
        """Return the row's tokens."""
        return self.keys[row].shape[1]

    def join(self, row: RowId, tokens: int) -> None:
        """Start a row without tokens, as soon as there is room."""
        while not self.caches.join(row, tokens=tokens):
            self.caches.tend()
        empty = mx.zeros((KV_HEADS, 0, HEAD_DIM))
        self.keys[row] = self.values[row] = empty

    def leave(self, row: RowId) -> None:
        """End a row."""
        self.caches.leave(row)
        del self.keys[row], self.values[row]

    def rewind(self, row: RowId, length: int) -> None:
        """Go back to an earlier offset."""
        assert self.caches.contents.restore(row, [], length)
        self.keys[row] = self.keys[row][:, :length]
        self.values[row] = self.values[row][:, :length]

    def append(self, rows: tuple[RowId, ...], width: int) -> None:
        """Write `width` tokens to each row and compare what its queries read."""
        offsets = [self.length(row) for row in rows]
        self.caches.reserve_all(
            {row: offset + width for row, offset in zip(rows, offsets, strict=True)}
        )
        self.written += 1
        draws = mx.random.split(mx.random.key(self.written), 3)
        shape = (len(rows), KV_HEADS, width, HEAD_DIM)
        queries = mx.random.normal((len(rows), HEADS, width, HEAD_DIM), key=draws[0])
        keys, values = (mx.random.normal(shape, key=key) for key in draws[1:])
        # The first number of each key and value says which row and which position it belongs to.
        tags = mx.array(
            [[row * 2048 + offset + step for step in range(width)] for row, offset in
             zip(rows, offsets, strict=True)], dtype=mx.float32,
        )  # fmt: skip
        keys[..., 0] = tags[:, None, :] / 1024
        values[..., 0] = tags[:, None, :]
        plan = self.caches.plan(
            rows,
            offsets=mx.array(offsets, dtype=mx.int32),
            lengths=tuple(offset + width for offset in offsets),
            width=width,
            dtype=mx.float32,
        )
        if plan.bounded_shapes:
            self.shapes |= shapes_of(plan)
        read = self.kv_cache().attend(Asked(queries, keys, values, plan, SCALE))
        mx.eval(read, self.caches.state())
        for index, row in enumerate(rows):
            self.keys[row] = mx.concatenate([self.keys[row], keys[index]], axis=1)
            self.values[row] = mx.concatenate([self.values[row], values[index]], axis=1)
            self._compare(row, queries[index], read[index])

    def _compare(self, row: RowId, queries: mx.array, read: mx.array) -> None:
        length, width = self.length(row), queries.shape[1]
        keys, values = (
            mx.repeat(array, HEADS // KV_HEADS, axis=0)
            for array in (self.keys[row], self.values[row])
        )
        scores = queries @ keys.transpose(0, 2, 1) * SCALE
        visible = mx.arange(length) <= (length - width + mx.arange(width))[:, None]
        expected = mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1) @ values
        assert mx.allclose(read, expected, rtol=1e-4, atol=1e-4).item(), row

    def check(self) -> None:
        """Compare the cache's own contents, position by position, and its bytes."""
        arrays = self.caches.arrays()
        for row in self.keys:
            place = self.caches.table.place(row)
            length = self.length(row)
            keys = arrays[f"layers.0.keys.{place.arena}"][place.slot, :, :length]
            values = arrays[f"layers.0.values.{place.arena}"][place.slot, :, :length]
            assert mx.array_equal(keys, self.keys[row]).item()
            assert mx.array_equal(values, self.values[row]).item()
        token_nbytes = 2 * KV_HEADS * HEAD_DIM * 4
        assert self.caches.nbytes == self.caches.table.tokens * token_nbytes
        assert set(self.keys) == set(self.caches.rows)


def naive(*, bounded_shapes: bool = False) -> Naive:
    """Return an empty pair of cache and reference."""
    cache = KVCache(kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=mx.float32)
    return Naive(
        RowCaches(
            [cache], context_max=CONTEXT_MAX, rows_max=ROWS_MAX, bounded_shapes=bounded_shapes
        )
    )
