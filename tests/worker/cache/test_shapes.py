"""Where MLX keys graphs or kernels by shape, attention takes few shapes, and reads the same."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.shapes import SHAPES_MAX, AttentionShape
from mlxd_worker.cache.rows import RowCaches
from tests.worker.cache.pass_shapes import shapes_of
from tests.worker.naive_kv import HEAD_DIM, KV_HEADS, naive


@pytest.mark.parametrize(
    ("bounded_shapes", "spans"),
    [(True, [1024, 1024, 1024, 1024]), (False, [32, 64, 320, 1024])],
)
def test_spans_are_few_or_fine(bounded_shapes: bool, spans: list[int]) -> None:
    """A batch attends whole arenas, or multiples of 32 where shapes are free."""
    pair = naive(bounded_shapes=bounded_shapes)
    rows = (RowId(1), RowId(2))
    for row in rows:
        pair.join(row, 1024)
    pair.caches.tend()

    seen, contents = [], pair.caches.contents
    for length in (32, 33, 300, 1000):
        contents.appending(rows[0], contents.offset(rows[0]), length - 1)
        pair.rewind(rows[1], 0)
        plan = pair.caches.plan(
            rows,
            offsets=mx.array([length - 1, 0], dtype=mx.int32),
            lengths=(length, 1),
            width=1,
            dtype=mx.float32,
        )
        (group,) = plan.groups
        assert group.last_visible.shape == (group.slots_used, 1)
        seen.append(group.span)

    assert seen == spans


@pytest.mark.parametrize("width", [2, 65, 513])
def test_padded_queries_read_what_exact_ones_do(width: int) -> None:
    """A chunk of any width, wherever it starts, reads its own history with padded queries too."""
    pair = naive(bounded_shapes=True)
    pair.join(RowId(1), 1024)
    for start in (0, 300, 1024 - width):
        if start > pair.length(RowId(1)):
            pair.append((RowId(1),), start - pair.length(RowId(1)))
        pair.rewind(RowId(1), start)
        pair.append((RowId(1),), width)
    pair.check()

    assert {shape.capacity for shape in pair.shapes} == {1024}
    assert {shape.width for shape in pair.shapes} <= {1, 64, 512}


@given(st.integers(1, 256), st.integers(1, 131072))
def test_shapes_are_few(rows_max: int, context_max: int) -> None:
    """At most 64 shapes, each once, for any bounds."""
    shapes = RowCaches([], context_max=context_max, rows_max=rows_max).shapes()

    assert len(set(shapes)) == len(shapes) <= SHAPES_MAX


def test_shapes_stay_few_in_traffic() -> None:
    """Sixteen rows of all lengths, joining, growing and leaving for hundreds of steps, take no
    shape that was not warmed.
    """
    cache = KVCache(kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=mx.float32)
    caches = RowCaches([cache], context_max=8192, rows_max=16, bounded_shapes=True)
    draws, seen = random.Random(5), set[AttentionShape]()
    lengths: dict[RowId, int] = {}

    def pass_over(rows: tuple[RowId, ...], width: int) -> None:
        caches.reserve_all({row: lengths[row] + width for row in rows})
        plan = caches.plan(
            rows,
            offsets=mx.array([lengths[row] for row in rows], dtype=mx.int32),
            lengths=tuple(lengths[row] + width for row in rows),
            width=width,
            dtype=mx.float32,
        )
        seen.update(shapes_of(plan))
        for row in rows:
            lengths[row] += width

    for number in range(400):
        row, tokens = RowId(number), int(2 ** draws.uniform(1, 13)) - 1
        if len(lengths) < 16 and caches.join(row, tokens=tokens):
            lengths[row] = 0
            pass_over((row,), tokens)
        pass_over(tuple(r for r in lengths if lengths[r] < 8192) or (row,), 1)
        if draws.random() < 0.5 or (lengths and max(lengths.values()) == 8192):
            gone = draws.choice(list(lengths))
            caches.leave(gone)
            del lengths[gone]
        caches.tend()

    assert seen <= set(caches.shapes())
    assert len({shape.capacity for shape in seen}) == 5
    assert 20 < len(seen) <= SHAPES_MAX
