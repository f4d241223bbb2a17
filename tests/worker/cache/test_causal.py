"""A chunk attended causally, in one call without a mask, reads what it reads under one."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.cache.arenas.plan import Chunk, StepPlan
from mlxd_worker.cache.base import ArenaId, Place
from mlxd_worker.cache.layers.attention import (
    CAUSAL_WIDTHS,
    WORTH_CUTTING,
    Asked,
    attend_causally,
    attend_chunk,
    attend_row,
    causal_width,
    unmasked_count,
)
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.nvrtc import find_compiler

HEADS, KV_HEADS, WIDTH = 4, 2, 16
LEAST, MOST = CAUSAL_WIDTHS[0], CAUSAL_WIDTHS[-1]


@pytest.mark.parametrize(
    ("start", "count", "width"),
    [
        (0, 1, LEAST),
        (0, LEAST, LEAST),
        (LEAST, LEAST, LEAST),
        (3 * LEAST, 300, LEAST),
        (0, LEAST + 1, 2 * LEAST),
        (2 * LEAST, 2 * LEAST, 2 * LEAST),
        (MOST, MOST - 1, MOST),
    ],
)
def test_a_chunk_at_a_multiple_of_its_width_is_attended_causally(
    start: int, count: int, width: int
) -> None:
    """By the least of few widths that holds it."""
    assert causal_width(start, count, 4 * MOST) == width


@pytest.mark.parametrize(
    ("start", "count"), [(1, LEAST), (LEAST, LEAST + 1), (LEAST, MOST), (0, MOST + 1)]
)
def test_any_other_chunk_is_not(start: int, count: int) -> None:
    """Each begin would be a shape of its own, for which a GPU builds a kernel."""
    assert causal_width(start, count, 4 * MOST) is None


@given(
    st.integers(0, 8 * MOST), st.integers(1, MOST), st.integers(0, 2 * MOST), st.integers(0, MOST)
)
def test_a_prompt_is_cut_where_no_mask_is_needed(
    start: int, count: int, later: int, room: int
) -> None:
    """But for what is before the first multiple of a width, and where little would be left."""
    wanted = count + later
    capacity = start + wanted + room
    chunk = unmasked_count(start, count, wanted=wanted, capacity=capacity)

    assert 0 < chunk <= count
    if chunk < count:
        assert wanted - chunk >= WORTH_CUTTING
        if start % LEAST:
            assert (start + chunk) % LEAST == 0
        else:
            assert chunk in CAUSAL_WIDTHS
            assert causal_width(start, chunk, capacity) == chunk
    elif wanted - count >= WORTH_CUTTING and not start % LEAST:
        assert causal_width(start, count, capacity) is not None


@pytest.mark.parametrize(
    ("start", "count", "wanted", "chunk"),
    [
        (0, MOST, 4 * MOST, MOST),
        (LEAST, MOST, 4 * MOST, LEAST),
        (2 * LEAST, MOST, 4 * MOST, 2 * LEAST),
        (3 * LEAST, LEAST + 1, LEAST + 1, LEAST + 1),
        (500, 600, 600, 600),
        (2000, MOST, MOST, 48),
    ],
)
def test_a_cut_is_worth_a_pass(start: int, count: int, wanted: int, chunk: int) -> None:
    """A prompt that ends soon has one pass, under a mask."""
    assert unmasked_count(start, count, wanted=wanted, capacity=8 * MOST) == chunk


def test_nothing_beyond_a_row_s_place_is_read() -> None:
    """Where the padding would not fit, chunks are attended under a mask."""
    assert causal_width(LEAST, 300, 2 * LEAST) == LEAST
    assert causal_width(LEAST, 300, 2 * LEAST - 1) is None


def test_there_are_few_shapes() -> None:
    """Of a row of 8,192 tokens, whatever chunks it is read in."""
    context = 8192
    shapes = {
        (width, start + width)
        for start in range(context)
        for count in (1, *CAUSAL_WIDTHS)
        if (width := causal_width(start, count, context)) is not None
    }
    assert len(shapes) == sum(context // width for width in CAUSAL_WIDTHS)


@pytest.mark.parametrize(("start", "count"), [(0, 40), (LEAST, LEAST), (LEAST, 7), (0, LEAST + 9)])
def test_queries_read_what_they_read_under_a_mask(start: int, count: int) -> None:
    """Each its own position and those before, whatever stands where padding is."""
    width = causal_width(start, count, 4 * MOST)
    assert width is not None
    keys = iter(mx.random.split(mx.random.key(start + count), 3))
    queries = mx.random.normal((1, HEADS, count, WIDTH), key=next(keys))
    shape = (1, KV_HEADS, start + width, WIDTH)
    all_keys, all_values = (mx.random.normal(shape, key=next(keys)) for _ in range(2))
    plan = StepPlan(width=count, dtype=mx.float32, bounded_shapes=True)
    own_keys, own_values = (array[:, :, start : start + count] for array in (all_keys, all_values))
    inputs = Asked(queries, own_keys, own_values, plan, WIDTH**-0.5)

    read = attend_causally(inputs, all_keys, all_values, width)

    expected = attend_chunk(queries, all_keys, all_values, length=start + count, scale=WIDTH**-0.5)
    assert read.shape == expected.shape
    assert float(mx.max(mx.abs(read - expected))) < 1e-4


@pytest.mark.skipif(not runs_cuda() or find_compiler() is None, reason="kernels for CUDA")
@pytest.mark.parametrize(("start", "count"), [(0, 600), (MOST, MOST), (3 * LEAST, 300)])
def test_kernels_write_a_chunk_and_read_it_causally(start: int, count: int) -> None:
    """In halves on a GPU: as under a mask, within what these round."""
    arena, capacity, width = ArenaId(0), 4 * MOST, 64
    layer = KVCache(kv_heads=KV_HEADS, head_dim=width, dtype=mx.bfloat16)
    keys = iter(mx.random.split(mx.random.key(start + count), 5))
    parts = [
        mx.random.normal((2, KV_HEADS, capacity, width), key=next(keys)).astype(mx.bfloat16)
        for _ in range(2)
    ]
    layer.settle(arena, parts)
    queries, own_keys, own_values = (
        mx.random.normal((1, heads, count, width), key=next(keys)).astype(mx.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    at = mx.array([1, start], dtype=mx.int32)
    chunk = Chunk(arena, capacity, slot=1, length=start + count, start=at, span=capacity)
    plan = StepPlan(width=count, dtype=mx.bfloat16, bounded_shapes=True, chunk=chunk)
    inputs = Asked(queries, own_keys, own_values, plan, width**-0.5)

    read = layer.attend(inputs)
    mx.eval(read)
    seen_keys, seen_values = layer.read(Place(arena, capacity, slot=1), 0, capacity)
    expected = attend_row(inputs, seen_keys, seen_values, chunk)

    assert bool(mx.array_equal(seen_keys[:, :, start : start + count], own_keys))
    difference = (read - expected).astype(mx.float32)
    norm = mx.linalg.norm(expected.astype(mx.float32))
    assert float(mx.linalg.norm(difference) / norm) < 0.02
