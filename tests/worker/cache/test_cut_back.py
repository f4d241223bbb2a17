"""Taking back what a pass wrote too far: what goes, what stays, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxd_worker.cache.base import RowError
from tests.worker.cache.numbered import OTHER, ROW, Numbered, sliding, standard
from tests.worker.cache.pair import pair
from tests.worker.cache.subjects import Recurrent, Subject
from tests.worker.cache.subjects import standard as standard_layer


@pytest.mark.parametrize("layer", [standard, lambda: sliding(8)], ids=["standard", "sliding"])
def test_what_is_written_next_lands_where_the_row_was_cut(layer: Callable[[], Numbered]) -> None:
    """The tokens before stay, those behind are seen by nobody any more."""
    one = layer()
    one.write([1, 2, 3])
    one.write([4, 90, 91, 92])
    one.contents.cut_back(ROW, 4)

    assert one.list_held() == [1, 2, 3, 4]
    assert one.write([5, 6]) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert one.list_held() == [1, 2, 3, 4, 5, 6]


def test_cutting_nothing_off_is_good() -> None:
    """A row may be cut back to where it stands."""
    one = standard()
    one.write([1, 2, 3])
    one.contents.cut_back(ROW, 3)
    assert one.list_held() == [1, 2, 3]


def test_snapshots_before_the_cut_cost_nothing_and_stay_right() -> None:
    """A lazy snapshot up to where the pass began is neither copied nor touched."""
    one = standard()
    one.write([1, 2, 3])
    kept = one.keep(0)
    one.write([4, 90, 91])
    one.contents.cut_back(ROW, 4)
    one.write([5])

    assert kept.nbytes == 0
    one.join(OTHER)
    assert one.contents.restore(OTHER, [kept], 3)
    assert one.list_held(OTHER) == [1, 2, 3]
    kept.close()


def test_what_was_kept_cannot_be_taken_back() -> None:
    """Below a snapshot's end, or a capture's, nothing is cut off: it would have told of guesses."""
    one = standard()
    one.write([1, 2, 3])
    kept = one.keep(0)
    with pytest.raises(RowError, match="cannot be cut back to 2"):
        one.contents.cut_back(ROW, 2)
    kept.close()

    captured = standard()
    captured.contents.schedule(ROW, [2])
    captured.write([1, 2, 3])  # which settles the capture at 2
    with pytest.raises(RowError, match="cannot be cut back to 1"):
        captured.contents.cut_back(ROW, 1)
    captured.contents.cut_back(ROW, 2)
    captured.contents.unschedule(ROW)


def test_a_capture_beyond_the_cut_is_not_made() -> None:
    """What falls due within what stays is captured once the row is settled, and nothing further."""
    one = standard()
    contents = one.contents
    one.write([1, 2])
    contents.schedule(ROW, [3, 5])
    contents.appending(ROW, 2, 6)
    contents.cut_back(ROW, 4)
    contents.settle(ROW)

    assert contents.offset(ROW) == 4
    due, beyond = contents.take(ROW)
    assert beyond is None
    assert due is not None
    assert [(kept.start, kept.stop) for kept in due.values()] == [(2, 3)]
    for kept in due.values():
        kept.close()


@pytest.mark.parametrize("target", [-1, 4])
def test_a_target_that_was_not_written_is_refused(target: int) -> None:
    """Neither ahead of the row nor before its beginning."""
    one = standard()
    one.write([1, 2, 3])
    with pytest.raises(RowError):
        one.contents.cut_back(ROW, target)


def test_a_window_that_wrapped_cannot_be_cut() -> None:
    """What the pass overwrote is gone: `takes_back` says so before it is run."""
    one = sliding(8)
    one.write([1, 2, 3, 4])
    assert one.contents.takes_back(ROW, 4)
    assert not one.contents.takes_back(ROW, 5)
    assert one.contents.takes_back(ROW, 1)

    one.write([5, 6, 7, 8])
    one.contents.cut_back(ROW, 6)
    one.write([7, 8, 9])
    with pytest.raises(RowError, match="cannot go back"):
        one.contents.cut_back(ROW, 8)


def test_a_recurrent_state_takes_nothing_back() -> None:
    """Only a pass of one token can be run where a layer's state is of all tokens at once."""
    both = pair(Subject("hybrid", (standard_layer(), Recurrent())))
    row = both.join(100)
    assert row is not None
    contents = both.caches.contents

    assert contents.takes_back(row, 1)
    assert not contents.takes_back(row, 2)
    contents.appending(row, 0, 2)
    with pytest.raises(RowError, match="cannot go back"):
        contents.cut_back(row, 1)


def test_a_pass_up_to_a_state_to_be_captured_is_the_widest() -> None:
    """Where a state is captured at an exact length, no guess may reach beyond that length."""
    one = sliding(64)
    one.write([1, 2, 3])
    one.contents.schedule(ROW, [6])

    assert one.contents.takes_back(ROW, 3)
    assert not one.contents.takes_back(ROW, 4)
    one.contents.unschedule(ROW)
