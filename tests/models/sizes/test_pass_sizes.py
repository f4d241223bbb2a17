"""What evaluating takes, by hand: the widest of attention, feed-forward, recurrence and logits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_models.sizes.cache_sizes import CacheSizes, WindowedLayers
from mlxd_models.sizes.pass_sizes import PassSizes

NARROW = PassSizes(hidden=8, projected=16, mlp=10, heads=2, vocab=5)
WHOLE = CacheSizes(kv_values_per_token=32, kv_heads=2, head_dim=8)
SLIDING = CacheSizes(0, kv_heads=2, head_dim=8, windows=(WindowedLayers(256, 32),))


def taken_nbytes(sizes: PassSizes, caches: CacheSizes, *, context: int, rows: int = 1) -> int:
    """Return what a pass of float32 takes on a CPU."""
    return sizes.nbytes(caches, context=context, rows=rows, item_nbytes=4, on_cpu=True)


def test_attention_takes_a_blocks_scores_seven_times() -> None:
    """Of 128 positions against all of the context: four times, and three more beyond the limit,
    of which one is of the block before, which does not read the last 128 positions."""
    around = 512 * (2 * 8 + 3 * 16)
    scores = 2 * 128 * (7 * 2048 - 128)
    assert taken_nbytes(NARROW, WHOLE, context=2048) == 4 * (around + scores)
    beyond = NARROW.beyond_nbytes(WHOLE, context=2048, item_nbytes=4)
    assert beyond == 4 * 2 * 128 * (3 * 2048 - 128)
    short = 100 * (2 * 8 + 3 * 16) + 7 * 2 * 100 * 100
    assert taken_nbytes(NARROW, WHOLE, context=100) == 4 * short


def test_a_window_is_attended_in_pieces_as_wide_as_itself() -> None:
    """However long the context: a piece against the window before it and itself, three times, with
    their keys and values and all masks; or a block against a window that has not wrapped. Beyond
    the limit are a norm and the projections of a chunk."""
    around = 512 * (2 * 8 + 3 * 16)
    piece = 3 * 2 * 256 * 512 + 512 * 2 * 2 * 8 + 512 * 512
    beyond = 512 * (8 + 16)
    pieces = 4 * (around + max(piece, 4 * 2 * 128 * 256) + beyond)
    assert (
        taken_nbytes(NARROW, SLIDING, context=2048)
        == taken_nbytes(NARROW, SLIDING, context=8192)
        == pieces
    )


def test_the_widest_part_counts_and_parts_do_not_add_up() -> None:
    """A wide feed-forward, a recurrent layer, or many logits each may be it."""
    wide = replace(NARROW, mlp=100_000)
    assert taken_nbytes(wide, WHOLE, context=512) == 4 * 512 * (3 * 8 + 4 * 100_000)
    recurrent = replace(NARROW, recurrent=10_000)
    assert taken_nbytes(recurrent, WHOLE, context=512) == 4 * 512 * (2 * 8 + 2 * 16 + 10_000)
    many = replace(NARROW, vocab=1_000_000)
    assert taken_nbytes(many, WHOLE, context=512, rows=2) == 2 * 4 * (2 + 2 * 16) * 1_000_000
    assert taken_nbytes(many, WHOLE, context=512, rows=9) == 2 * 4 * (9 + 64) * 1_000_000


def test_a_gpu_is_given_a_whole_pass_at_once() -> None:
    """There all of a chunk's scores may be alive, beside what all of a pass's tokens become."""
    long = 1 << 16
    nbytes = NARROW.nbytes(WHOLE, context=long, rows=1, item_nbytes=2, on_cpu=False)
    together = 3 * 4 * 2 * 128 * long + 8 * (2 * 8 * long + 2 * 8 * 4096)
    assert nbytes == 2 * 2048 * (3 * 8 + 16 + 3 * 10) + max(2 * 512 * 2 * 2 * long, together)


@pytest.mark.parametrize(
    ("sizes", "caches"),
    [
        (replace(NARROW, recurrent=10), WHOLE),
        (NARROW, SLIDING),
        (NARROW, replace(WHOLE, foreign=True)),
    ],
    ids=["recurrent", "windows", "foreign"],
)
def test_what_does_not_keep_every_position_is_read_by_chunks(
    sizes: PassSizes, caches: CacheSizes
) -> None:
    """On a GPU too: a chunk's widest part, and its scores."""
    nbytes = sizes.nbytes(caches, context=4096, rows=1, item_nbytes=2, on_cpu=False)
    of_chunk = 2 * 512 * (3 * 8 + 16 + 3 * 10) + 4 * 512 * sizes.recurrent
    assert nbytes == of_chunk + 2 * 512 * 2 * 2 * 4096


def test_a_gpu_has_room_for_prompts_in_company() -> None:
    """Where contexts are short: their scores three times, what they read and its keys twice, and
    their queries twice with what these become.
    """
    nbytes = NARROW.nbytes(WHOLE, context=64, rows=1, item_nbytes=2, on_cpu=False)
    scores, read = 3 * 4 * 2 * (256 * 2048), (2 * 2 + 4) * 2 * 8 * (2 * 2048)
    queries = (2 * 2 + 4) * 2 * 8 * (2 * 2048)
    assert nbytes == 2 * 2048 * (3 * 8 + 16 + 3 * 10) + scores + read + queries
