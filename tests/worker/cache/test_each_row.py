"""What is done for all rows of a pass at once is what is done row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxd_worker.cache.base import RowError, RowId
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.rows import RowCaches
from tests.support.counting import calls_of
from tests.worker.cache.numbered import OTHER, ROW, Numbered, sliding, standard

ABSENT = RowId(99)


def of_two(layer: Callable[[], Numbered]) -> Numbered:
    """Return a row that holds four tokens, beside one that holds two."""
    one = layer()
    one.write([1, 2, 3, 4])
    one.join(OTHER)
    one.write([7, 8], OTHER)
    return one


@pytest.mark.parametrize("layer", [standard, lambda: sliding(8)], ids=["standard", "sliding"])
def test_rows_go_on_and_back_together(layer: Callable[[], Numbered]) -> None:
    """Each by its own count, and each to its own place."""
    contents = of_two(layer).contents
    contents.append_each([ROW, OTHER], [5, 5], [1, 3])
    assert (contents.offset(ROW), contents.offset(OTHER)) == (5, 5)

    contents.cut_back_each({ROW: 5, OTHER: 3})
    assert (contents.offset(ROW), contents.offset(OTHER)) == (5, 3)


@pytest.mark.parametrize(
    ("stops", "counts"), [((6, 3), (1, 1)), ((5, 2), (1, 1)), ((5, 3), (1, -1)), ((5, 3), (2, 1))]
)
def test_a_pass_that_does_not_begin_where_a_row_stands_is_refused(
    stops: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    """As for a row by itself."""
    contents = of_two(standard).contents
    with pytest.raises(RowError):
        contents.append_each([ROW, OTHER], stops, counts)


def test_unknown_rows_and_places_ahead_are_refused() -> None:
    """As for a row by itself."""
    contents = of_two(standard).contents
    with pytest.raises(RowError):
        contents.append_each([ABSENT], [1], [1])
    with pytest.raises(RowError):
        contents.cut_back_each({ABSENT: 0})
    with pytest.raises(RowError):
        contents.cut_back_each({ROW: 5})


def test_what_is_kept_is_copied_out_and_not_taken_back() -> None:
    """A row of which something is kept goes the longer way, in company too."""
    one = of_two(standard)
    kept = one.keep(0)
    one.contents.append_each([OTHER, ROW], [3, 6], [1, 2])
    with pytest.raises(RowError, match="cannot be cut back to 3"):
        one.contents.cut_back_each({OTHER: 2, ROW: 3})
    one.contents.cut_back_each({ROW: 4})
    assert kept.nbytes == 0
    kept.close()


def test_a_window_that_has_wrapped_is_not_cut_back() -> None:
    """A layer that cannot go back says so, for all rows at once too."""
    one = sliding(2)
    one.write([1, 2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(RowError, match="cannot go back"):
        one.contents.cut_back_each({ROW: 1})


def test_rows_of_which_nothing_is_kept_cost_no_calls() -> None:
    """A pass asks once for all of them."""
    contents = of_two(standard).contents
    pass_ = lambda: contents.append_each([ROW, OTHER], [5, 3], [1, 1])  # noqa: E731

    assert calls_of(pass_, RowContents.appending) == 0
    assert calls_of(lambda: contents.cut_back_each({ROW: 4, OTHER: 2}), RowContents.cut_back) == 0


def test_the_places_of_many_rows_are_those_of_each() -> None:
    """In the order in which they are asked, and none of a row that is not there."""
    caches: RowCaches = of_two(standard).caches
    assert caches.table.places([OTHER, ROW]) == [caches.table.place(OTHER), caches.table.place(ROW)]
    with pytest.raises(RowError, match="row 99"):
        caches.table.places([ROW, ABSENT])
