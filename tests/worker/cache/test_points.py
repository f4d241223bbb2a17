"""Where whole states are captured: near every end, sparse behind it, and never too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.cache.kept.points import (
    GRID_TOKENS,
    PROMPT_POINTS_MAX,
    next_rolling,
    prompt_points,
)


@pytest.mark.parametrize(
    ("start", "end", "branch", "points"),
    [
        (0, 4, None, (4,)),
        (0, 64, None, (64,)),
        (0, 65, None, (64, 65)),
        (0, 300, None, (64, 192, 256, 300)),
        (1984, 2059, 2000, (2000, 2048, 2059)),
        (5, 7, 5, (7,)),
        (7, 7, None, ()),
        (8000, 24_700, None, (8192, 8320, 16_384, 16_512, 20_608, 22_656, 23_680, 24_192, 24_448,
                              24_576, 24_640, 24_700)),
    ],
)  # fmt: skip
def test_points_of_a_prompt(
    start: int, end: int, branch: int | None, points: tuple[int, ...]
) -> None:
    """The end, the branch, multiples of 64 at doubling distances, multiples of 8,192."""
    assert prompt_points(start, end, branch=branch) == points


@given(start=st.integers(0, 3000), new=st.integers(1, 200_000), cut=st.integers(0, GRID_TOKENS))
def test_a_late_divergence_costs_at_most_the_grid(start: int, new: int, cut: int) -> None:
    """Up to 64 tokens before the end, at most 64 cached tokens have to be evaluated again."""
    end = start + new
    points = prompt_points(start, end)

    assert len(points) <= PROMPT_POINTS_MAX
    assert list(points) == sorted(set(points))
    assert start < points[0] <= points[-1] == end
    departs = max(end - cut, start)
    assert departs - max((p for p in points if p <= departs), default=start) <= GRID_TOKENS


def test_few_points_are_the_useful_ones() -> None:
    """Where memory allows few captures, the end goes first, then the branch, then the grid."""
    chosen = [prompt_points(0, 20_000, branch=100, points_max=most) for most in range(5)]
    assert chosen == [(), (20_000,), (100, 20_000), (100, 19_968, 20_000),
                      (100, 19_904, 19_968, 20_000)]  # fmt: skip


def test_the_end_of_the_last_block_is_a_point() -> None:
    """Where blocks are kept on disk: else a prompt's states would be in none of them."""
    assert 4864 in prompt_points(0, 5000, block_tokens=256)
    assert prompt_points(0, 5000, block_tokens=256, points_max=2) == (4864, 5000)
    assert prompt_points(4900, 5000, block_tokens=256) == prompt_points(4900, 5000)
    assert prompt_points(0, 200, block_tokens=256) == prompt_points(0, 200)


def test_generated_text_is_captured_on_the_same_grid() -> None:
    """Every multiple of 64 that is still to come."""
    assert [next_rolling(offset) for offset in (0, 63, 64, 2059)] == [64, 64, 128, 2112]
