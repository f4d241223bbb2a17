"""Where tokens stand on three axes: images by row and column, text behind the longer of both."""

from __future__ import annotations

import pytest

from mlxd_worker.engine.axes import axes_of, shift_before, turns_of
from mlxd_worker.engine.request import Image, StreamId, Submit
from tests.support.engines import GREEDY, Collected


def image(start: int, rows: int, columns: int) -> Image:
    """Return an image of so many places."""
    return Image(b"", start, rows * columns, b"", (rows, columns))


IMAGES = (image(3, 2, 3), image(10, 4, 1), image(14, 1, 2))
"""Three tokens, an image, one token, two images without a text between, and text."""
TIMES = [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 7, 7, 7, 11, 11, 13, 14, 15]
HEIGHTS = [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10, 11, 11, 13, 14, 15]
WIDTHS = [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 7, 7, 7, 11, 12, 13, 14, 15]
COUNT = len(TIMES)


def test_an_image_stands_by_rows_and_columns() -> None:
    """Written out by hand, by the rule of Qwen2-VL."""
    assert axes_of(IMAGES, 0, COUNT) == (TIMES, HEIGHTS, WIDTHS)


def test_any_cut_says_the_same() -> None:
    """Whatever chunk a token is read in, it stands at one place."""
    for first in range(COUNT):
        for stop in range(first + 1, COUNT + 1):
            axes = axes_of(IMAGES, first, stop - first)
            assert axes == (TIMES[first:stop], HEIGHTS[first:stop], WIDTHS[first:stop])


def test_what_is_generated_goes_on_behind_the_text() -> None:
    """By the shift of all images, however long the prompt is."""
    request = Submit(StreamId(1), (1,) * COUNT, GREEDY, None, 0.0, Collected(), images=IMAGES)
    assert COUNT - 1 + request.shift == TIMES[-1]
    assert request.shift == shift_before(IMAGES, COUNT) == -3
    assert Submit(StreamId(1), (1,), GREEDY, None, 0.0, Collected()).shift == 0


def test_images_of_one_size_stand_like_text() -> None:
    """Without rows and columns a place is a token as any other: no pass has turns."""
    plain = (Image(b"", 1, 6, b""),)
    assert turns_of([(plain, 0, 9)]) is None
    assert turns_of([((), 0, 9), (plain, 3, 2)]) is None
    assert plain[0].shift == 0


def test_a_pass_has_one_number_a_row_where_that_is_enough() -> None:
    """Three only where it shows an image, none before the first; of several chunks one a token."""
    assert turns_of([(IMAGES, 0, 3)]) is None
    behind = turns_of([(IMAGES, 16, 3)])
    assert behind is not None
    assert behind.tolist() == [13]
    several = turns_of([(IMAGES, 16, 2), ((), 5, 2), (IMAGES, 9, 1)])
    assert several is not None
    assert several.tolist() == [13, 14, 5, 6, 6]
    seen = turns_of([(IMAGES, 2, 3)])
    assert seen is not None
    assert seen.tolist() == [[[2, 3, 3]], [[2, 3, 3]], [[2, 3, 4]]]
    both = turns_of([((), 7, 1), (IMAGES, 6, 2)])
    assert both is not None
    assert both.tolist() == [[[7], [3], [3]], [[7], [4], [4]], [[7], [3], [4]]]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_longer_side_counts(rows: int) -> None:
    """What follows stands as many further as the longer side has places."""
    only = image(0, rows, 3)
    times, _, _ = axes_of((only,), only.stop, 1)
    assert times == [max(rows, 3)]
