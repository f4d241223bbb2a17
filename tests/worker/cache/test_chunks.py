"""Several rows' chunks in one pass: who is attended with whom, and what is too much for one."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlxd_models.sizes.pass_sizes import together_max
from mlxd_worker.cache.arenas.chunks import (
    WIDTH_MIN,
    Attended,
    Stretch,
    split_into_calls,
    stretches_of,
)
from mlxd_worker.cache.base import ArenaId, Place
from mlxd_worker.cache.layers.attention import attend_slots
from tests.worker.tiny import difference

CONTEXT = 1024


def place(slot: int, *, arena: int = 0) -> Place:
    """Return a place."""
    return Place(ArenaId(arena), 256, slot)


def test_chunks_lie_one_after_another() -> None:
    """Each begins where the one before it ends."""
    places = [place(2), place(0, arena=1)]

    assert stretches_of(places, (9, 40), (3, 40)) == [
        Stretch(places[0], first=0, count=3, end=9),
        Stretch(places[1], first=3, count=40, end=40),
    ]


def test_a_call_is_of_one_arena_and_of_like_widths() -> None:
    """Widths up to the least one go together, others with those of at least half their width."""
    counts = (1, WIDTH_MIN, 17, 32, 33, 5)
    places = [place(5), place(4), place(3), place(2), place(1), place(0, arena=1)]
    calls = split_into_calls(stretches_of(places, counts, counts))

    assert [[its.count for its in call] for call in calls] == [[WIDTH_MIN, 1], [32, 17], [33], [5]]


def reckon(counts: Sequence[int], lengths: Sequence[int]) -> Attended:
    """Return what chunks take together."""
    taken = Attended()
    for count, length in zip(counts, lengths, strict=True):
        taken = taken.beside(count, length)
    return taken


@pytest.mark.parametrize(
    ("counts", "lengths", "fit"),
    [
        ([15] * 32, [15] * 32, True),
        ([15] * 33, [15] * 33, False),
        ([15] * 2, [1000, 15], False),
        ([127] * 4, [127] * 4, True),
        ([200] * 2, [200] * 2, False),
        ([200, 15], [200, 15], True),
        ([64, *[33] * 7], [64, *[33] * 7], True),
        ([64, *[33] * 8], [64, *[33] * 8], False),
    ],
)
def test_what_a_pass_reads_is_bounded(counts: list[int], lengths: list[int], *, fit: bool) -> None:
    """Rows of one call are all as long as the longest: together no longer than the context, and
    with no more scores than half a block's against it, and no more queries than a chunk.
    """
    most = together_max(CONTEXT, on_cpu=True)
    assert reckon(counts, lengths).within(most) is fit


@pytest.mark.parametrize(("length", "fit"), [(4096, True), (4097, False)])
def test_long_rows_are_read_alone_on_a_cpu(length: int, *, fit: bool) -> None:
    """However long the context: to copy them would cost more than to read the weights again."""
    most = together_max(131_072, on_cpu=True)
    assert reckon([20] * 2, [length] * 2).within(most) is fit


@pytest.mark.parametrize(("rows", "tokens"), [(128, 16), (32, 64), (16, 127), (4, 500)])
@pytest.mark.parametrize("context", [256, 1024, 8192])
def test_a_gpu_s_pass_holds_whole_crowds(rows: int, tokens: int, context: int) -> None:
    """As many short prompts as a pass has tokens for, whatever the context."""
    most = together_max(context, on_cpu=False)
    fit = reckon([tokens] * rows, [tokens] * rows).within(most)

    assert fit is (rows > 4 or context > 1024)


@pytest.mark.parametrize("sinks", [False, True])
def test_no_score_is_rounded_to_half_precision(*, sinks: bool) -> None:
    """Where single products attend: large scores that differ by less than such a value's step."""
    key = mx.random.key(3)
    queries, keys, values = (
        mx.random.normal((2, heads, 16, 32), key=own).astype(mx.bfloat16)
        for heads, own in zip((4, 2, 2), mx.random.split(key, 3), strict=True)
    )
    mask = mx.where(mx.arange(16)[:, None] < mx.arange(16), -mx.inf, 0.0)[None, None]
    beside = mx.array([1.0, -2.0, 9.0, 0.5]) if sinks else None
    exact = attend_slots(
        queries.astype(mx.float32),
        keys.astype(mx.float32),
        values.astype(mx.float32),
        mx.broadcast_to(mask, (2, 1, 16, 16)),
        scale=3.0,
        sinks=beside,
    )
    ours = attend_slots(
        queries,
        keys,
        values,
        mx.broadcast_to(mask.astype(mx.bfloat16), (2, 1, 16, 16)),
        scale=3.0,
        sinks=None if beside is None else beside.astype(mx.bfloat16),
        fused=False,
    )

    assert difference(exact, ours.astype(mx.float32)) < 0.02
