"""Images in their own shapes in an engine: streams say what one pass over everything says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_worker.vision.sight import Placed
from tests.support.qwen_vl_cases import CASES, GRIDS, PIECES, PLACE
from tests.support.seeing_engines import Around, Seeing, seeing_engine

CASE = CASES[0]
AROUND = Around(PIECES[0], (PLACE, 17), PIECES[3])


@pytest.fixture
def seeing(tmp_path: Path) -> Seeing:
    """An engine on a tiny Qwen2.5-VL that keeps prefixes."""
    return seeing_engine(CASE, CASE.write(tmp_path / "model"), AROUND, tokens_max=12)


def test_a_stream_says_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks and steps, with guesses and without, behind a former prompt and anew."""
    first, second, third = seeing.pictures
    placed = seeing.place(first, second, third)
    expected = seeing.expect(placed)
    assert seeing.run(placed).ids == expected
    again = seeing.run(placed)
    assert (again.ids, again.reused) == (expected, len(placed.ids) - 1)
    assert seeing.run(placed, speculation_depth=3).ids == expected
    seeing.tiny.prefix.clear()
    assert seeing.run(placed, speculation_depth=3).ids == expected


def test_an_image_is_known_by_its_shape_too(seeing: Seeing) -> None:
    """The same bytes as another number of rows are another image: nothing of it is reused."""
    pixels, grid = seeing.pictures[0]
    assert grid is not None
    seeing.run(seeing.place((pixels, grid)))
    other = seeing.place((pixels, (grid[1], grid[0])))
    answer = seeing.run(other)
    assert answer.reused == len(PIECES[0])
    assert answer.ids == seeing.expect(other)


def test_at_another_place_an_image_is_read_anew(seeing: Seeing) -> None:
    """Behind other text, or as the second image, its keys and values are not those of before; the
    tower need not see it again."""
    first, second, _ = seeing.pictures
    seeing.run(seeing.place(first))
    seen = seeing.gallery.seen
    moved = seeing.place(first, before=(*PIECES[0], 70))
    answer = seeing.run(moved)
    assert (answer.reused, answer.ids) == (len(PIECES[0]), seeing.expect(moved))
    assert seeing.gallery.seen == seen
    behind = seeing.place(second, first)
    answer = seeing.run(behind)
    assert (answer.reused, answer.ids) == (len(PIECES[0]), seeing.expect(behind))


def test_rows_with_images_share_steps_with_text(seeing: Seeing) -> None:
    """Streams side by side, of other shapes and of none, say what each says alone."""
    first, second, third = seeing.pictures
    prompts = [
        seeing.place(first),
        seeing.place(second, third),
        Placed(PIECES[3], (), ()),
        seeing.place(third, before=(70,)),
    ]
    assert seeing.run_together(prompts) == [seeing.expect(placed) for placed in prompts]


@pytest.mark.parametrize("by_steps", [True, False])
def test_a_stream_goes_on_behind_its_images(seeing: Seeing, *, by_steps: bool) -> None:
    """Resumed after any of its tokens, from the request alone, it says what it would have said."""
    placed = seeing.place(*seeing.pictures[:2])
    whole = seeing.run(placed)
    for cut in (1, 5, 11):
        assert seeing.resume(placed, whole, cut, by_steps=by_steps) == whole.ids


def test_images_of_other_sizes_are_seen_one_by_one(seeing: Seeing) -> None:
    """Each array of features is as large as its image has places, and is counted by name."""
    first, second, third = seeing.pictures
    seeing.run(seeing.place(first, second, third))
    hidden = seeing.gallery.sizes.hidden
    kept = sorted(array.nbytes for array in seeing.gallery.arrays().values())
    assert kept == sorted(4 * hidden * rows * columns for rows, columns in GRIDS[1:])
    assert seeing.gallery.sizes.together == 1
    seeing.gallery.warm_up()
    assert not seeing.gallery.arrays()
