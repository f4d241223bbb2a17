"""Images in an engine of Qwen3-VL, with deep levels, and of Qwen3.5, with recurrent layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_worker.vision.sight import Placed
from tests.support.qwen3_vl_cases import CASES
from tests.support.qwen_vl_cases import GRIDS, PIECES
from tests.support.resuming import resumed_prompt
from tests.worker.engine.test_shaped_images import TOKENS, Picture, Seeing, seeing_of

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=["deep", "hybrid"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Seeing:
    """An engine on a tiny model that keeps prefixes."""
    return seeing_of(BY_NAME[request.param], tmp_path / "model")


def pictures() -> list[Picture]:
    """Return three images of other shapes."""
    case = BY_NAME["deep"]
    return [(each.tobytes(), grid) for each, grid in zip(case.pixels(), GRIDS, strict=True)]


def test_a_stream_says_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks that cut images, and behind a former prompt: a chat that goes on reads the images
    of before no more, and says what it would have said."""
    placed = seeing.place(*pictures())
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
    first, second, _ = pictures()
    placed = seeing.place(first, second)
    whole = seeing.run(placed)
    again = seeing.run(placed)
    assert again.ids == whole.ids
    assert again.reused > placed.images[0].stop
    darker = (bytes([first[0][0] ^ 1, *first[0][1:]]), first[1])
    other = seeing.place(darker, second)
    answer = seeing.run(other)
    assert answer.reused <= other.images[0].start
    assert answer.ids == seeing.expect(other)


def test_rows_with_images_share_steps_with_text(seeing: Seeing) -> None:
    """Streams side by side, of other shapes and of none, say what each says alone."""
    first, second, third = pictures()
    prompts = [seeing.place(first), seeing.place(second, third), Placed(PIECES[3], (), ())]
    sinks = [
        seeing.tiny.submit(placed.ids, images=placed.images, keys=placed.keys, max_tokens=TOKENS)[1]
        for placed in prompts
    ]
    seeing.tiny.run()
    assert [sink.ids for sink in sinks] == [seeing.expect(placed) for placed in prompts]


@pytest.mark.parametrize("by_steps", [True, False])
def test_a_stream_goes_on_behind_its_images(seeing: Seeing, *, by_steps: bool) -> None:
    """Resumed after any of its tokens, from the request alone, it says what it would have said."""
    placed = seeing.place(*pictures()[:2])
    whole = seeing.run(placed)
    for cut in (1, 11):
        seeing.tiny.prefix.clear()
        seeing.gallery.clear()
        resumed = resumed_prompt(placed.ids, whole, cut, by_steps=by_steps)
        keys = placed.keys if by_steps else (*placed.keys, *whole.ids[:cut])
        rest = seeing.run(placed, keys=keys, **resumed)
        assert [*whole.ids[:cut], *rest.ids] == whole.ids


def test_features_of_all_levels_are_kept(seeing: Seeing) -> None:
    """The arrays in the account are as large as places, levels and values make them."""
    first, second, _ = pictures()
    seeing.run(seeing.place(first, second))
    sizes = seeing.gallery.sizes
    kept = sorted(array.nbytes for array in seeing.gallery.arrays().values())
    feature = 4 * sizes.hidden * (1 + sizes.levels)
    assert kept == sorted(feature * rows * columns for rows, columns in GRIDS[:2])
