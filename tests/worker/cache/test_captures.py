"""The schedule of captures, without any cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.cache.base import RowError
from mlxd_worker.cache.kept.captures import Captures


def fire_due(captures: Captures[str], offset: int) -> list[tuple[int, int]]:
    """Fire whatever is due and return it."""
    dues = []
    while (due := captures.due(offset)) is not None:
        captures.fire("-".join(map(str, due)))
        dues.append(due)
    return dues


def test_the_base_moves_on_capture_and_not_at_the_end_of_a_write() -> None:
    """A row at 2 with {2, 3, 5}, writing 2 and 2: nothing, [2, 3) and [3, 5)."""
    captures: Captures[str] = Captures([2, 3, 5], offset=2)

    assert captures.next_stop == 3
    assert fire_due(captures, 4) == [(2, 3)]
    assert fire_due(captures, 6) == [(3, 5)]
    assert captures.next_stop is None
    assert captures.results() == [None, "2-3", "3-5"]


def test_offsets_that_were_never_reached_give_nothing() -> None:
    """A prefill that is cancelled has one result for each offset all the same."""
    captures: Captures[str] = Captures([4, 8], offset=0)
    fire_due(captures, 7)

    assert captures.results() == ["0-4", None]


@pytest.mark.parametrize("offsets", [[3, 2], [2, 2], [1, 5], [-1]])
def test_offsets_out_of_order_or_in_the_past_are_refused(offsets: list[int]) -> None:
    """A schedule is sorted, distinct, and begins no earlier than the row stands."""
    with pytest.raises(RowError):
        Captures(offsets, offset=2)


@given(
    offsets=st.sets(st.integers(5, 60), max_size=8),
    steps=st.lists(st.integers(1, 20), max_size=12),
)
def test_however_the_tokens_arrive_the_captures_are_the_same(
    offsets: set[int], steps: list[int]
) -> None:
    """What is captured depends on the schedule and the last offset, not on the writes between."""
    offsets_in_order = sorted(offsets)
    captures: Captures[str] = Captures(offsets_in_order, offset=5)
    for count in range(len(steps)):
        fire_due(captures, 5 + sum(steps[: count + 1]))
    at_once: Captures[str] = Captures(offsets_in_order, offset=5)
    fire_due(at_once, 5 + sum(steps))

    assert captures.results() == at_once.results()
