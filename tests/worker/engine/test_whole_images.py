"""Images that no pass may cut, in an engine: streams say what one pass over everything says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_worker.cache.prefix.images import points_beside_images
from mlxd_worker.cache.prefix.trie_node import key_of
from mlxd_worker.vision.sight import Placed, key_of_image
from tests.support.gemma3_cases import BEFORE, BEHIND, CASES, PLACE
from tests.support.seeing_engines import Around, Seeing, change_value, seeing_engine

AROUND = Around((77, 41, 8), (BEFORE, PLACE, BEHIND), (33, 12, 200, 150, 61, 9))
LONG = tuple(range(20, 80))
"""Text behind which the next point at which states are kept, 64, is within an image."""


@pytest.fixture(params=["windows", "all-full"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Seeing:
    """An engine on a tiny Gemma 3 whose chunks are shorter than an image; it keeps prefixes."""
    case = next(case for case in CASES if case.name == request.param)
    return seeing_engine(case, case.write(tmp_path / "model"), AROUND, tokens_max=8)


def test_a_stream_says_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks and steps, with guesses and without, behind a former prompt and anew."""
    first, second = seeing.pictures
    placed = seeing.place(first, second)
    assert [image.whole for image in placed.images] == [True, True]
    expected = seeing.expect(placed)
    assert seeing.run(placed).ids == expected
    again = seeing.run(placed)
    assert (again.ids, again.reused) == (expected, len(placed.ids) - 1)
    assert seeing.run(placed, speculation_depth=3).ids == expected
    seeing.tiny.prefix.clear()
    assert seeing.run(placed, speculation_depth=3).ids == expected


def test_what_is_kept_ends_within_no_image(seeing: Seeing) -> None:
    """Another image goes on from where it begins, also where windows keep states at points alone;
    the same one with other text behind it from behind it."""
    first, second = seeing.pictures
    seeing.run(seeing.place(first, before=LONG))
    for other in (second, change_value(first)):
        placed = seeing.place(other, before=LONG)
        answer = seeing.run(placed)
        assert answer.reused == placed.images[0].start == len(LONG) + 1
        assert answer.ids == seeing.expect(placed)
    placed = seeing.place(first, before=LONG)
    image = placed.images[0]
    other_text = (5 + 60, 5 + 61)
    ids, keys = ((*each[: image.stop], *other_text) for each in (placed.ids, placed.keys))
    answer = seeing.run(Placed(tuple(ids), tuple(keys), placed.images))
    assert answer.reused == image.stop
    assert answer.ids == seeing.expect(Placed(tuple(ids), tuple(keys), placed.images))


def test_rows_with_images_share_steps_with_text(seeing: Seeing) -> None:
    """Streams side by side, with images and with none, say what each says alone."""
    first, second = seeing.pictures
    prompts = [
        seeing.place(first),
        seeing.place(second, first),
        Placed(AROUND.behind, (), ()),
        seeing.place(second, before=(70, *LONG)),
    ]
    assert seeing.run_together(prompts) == [seeing.expect(placed) for placed in prompts]


@pytest.mark.parametrize("by_steps", [True, False])
def test_a_stream_goes_on_behind_its_images(seeing: Seeing, *, by_steps: bool) -> None:
    """Resumed after any of its tokens, from the request alone, it says what it would have said."""
    placed = seeing.place(*seeing.pictures)
    whole = seeing.run(placed)
    for cut in (1, 5, 7):
        assert seeing.resume(placed, whole, cut, by_steps=by_steps) == whole.ids


def test_points_within_an_image_are_both_its_ends() -> None:
    """Those beside images stay; none is at the start, nor behind the last token; the last stay."""
    key = key_of([*range(10), *key_of_image(b"a", 8), *range(5), *key_of_image(b"b", 4), 1])
    points = [4, 10, 11, 17, 18, 22, 25]
    assert points_beside_images(key, points, 0, 16) == [4, 10, 18, 22, 23, 27]
    assert points_beside_images(key, points, 0, 3) == [22, 23, 27]
    assert points_beside_images(key, [12, 18, 19], 10, 16) == [18, 19]
    long = key_of([1, *key_of_image(b"a", 3000), 2])
    assert points_beside_images(long, [1500], 0, 16) == [1, 3001]
    assert points_beside_images(key_of(key_of_image(b"a", 3000)), [1500], 0, 16) == []
