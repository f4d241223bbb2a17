"""Images in an engine of Qwen3-VL, with deep levels, and of Qwen3.5, with recurrent layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_worker.vision.sight import Placed
from tests.support.qwen3_vl_cases import CASES
from tests.support.qwen_vl_cases import GRIDS, PIECES, PLACE
from tests.support.seeing_engines import Around, Seeing, change_value, seeing_engine

BY_NAME = {case.name: case for case in CASES}
AROUND = Around(PIECES[0], (PLACE, 17), PIECES[3])


@pytest.fixture(params=["deep", "hybrid"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Seeing:
    """An engine on a tiny model that keeps prefixes."""
    case = BY_NAME[request.param]
    return seeing_engine(case, case.write(tmp_path / "model"), AROUND, tokens_max=12)


def test_a_stream_says_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks that cut images, and behind a former prompt: a chat that goes on reads the images
    of before no more, and says what it would have said."""
    placed = seeing.place(*seeing.pictures)
    expected = seeing.expect(placed)
    assert seeing.run(placed).ids == expected
    seen = seeing.gallery.seen
    longer = Placed(
        (*placed.ids, *expected, *PIECES[1]), (*placed.keys, *expected, *PIECES[1]), placed.images
    )
    answer = seeing.run(longer)
    assert answer.reused >= len(placed.ids) - 1
    assert seeing.gallery.seen == seen
    assert answer.ids == seeing.expect(longer)


def test_the_same_image_hits_and_another_never_does(seeing: Seeing) -> None:
    """What is found ends before an image that differs, whatever its shape."""
    first, second, _ = seeing.pictures
    placed = seeing.place(first, second)
    whole = seeing.run(placed)
    again = seeing.run(placed)
    assert again.ids == whole.ids
    assert again.reused > placed.images[0].stop
    other = seeing.place(change_value(first), second)
    answer = seeing.run(other)
    assert answer.reused <= other.images[0].start
    assert answer.ids == seeing.expect(other)


def test_rows_with_images_share_steps_with_text(seeing: Seeing) -> None:
    """Streams side by side, of other shapes and of none, say what each says alone."""
    first, second, third = seeing.pictures
    prompts = [seeing.place(first), seeing.place(second, third), Placed(PIECES[3], (), ())]
    assert seeing.run_together(prompts) == [seeing.expect(placed) for placed in prompts]


@pytest.mark.parametrize("by_steps", [True, False])
def test_a_stream_goes_on_behind_its_images(seeing: Seeing, *, by_steps: bool) -> None:
    """Resumed after any of its tokens, from the request alone, it says what it would have said."""
    placed = seeing.place(*seeing.pictures[:2])
    whole = seeing.run(placed)
    for cut in (1, 11):
        assert seeing.resume(placed, whole, cut, by_steps=by_steps) == whole.ids


def test_features_of_all_levels_are_kept(seeing: Seeing) -> None:
    """The arrays in the account are as large as places, levels and values make them."""
    first, second, _ = seeing.pictures
    seeing.run(seeing.place(first, second))
    sizes = seeing.gallery.sizes
    kept = sorted(array.nbytes for array in seeing.gallery.arrays().values())
    feature = 4 * sizes.hidden * (1 + sizes.levels)
    assert kept == sorted(feature * rows * columns for rows, columns in GRIDS[:2])
