"""Images in an engine: seen once, looked up by what they show, and read again after a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.models.base import Sighted
from mlxd_worker.vision.sight import Placed
from tests.support.llava_cases import CASES, PIECES, PLACE
from tests.support.seeing_engines import Around, Seeing, change_value, seeing_engine

CASE = CASES[0]
AROUND = Around(PIECES[0], (PLACE, 17), PIECES[2])


@pytest.fixture
def seeing(tmp_path: Path) -> Seeing:
    """An engine on a tiny LLaVA that keeps prefixes."""
    return seeing_engine(CASE, CASE.write(tmp_path / "model"), AROUND, tokens_max=8)


def test_an_image_decides_what_is_said(seeing: Seeing) -> None:
    """The same text after another image is another answer; the same image gives the same one."""
    first, second = seeing.pictures
    said = [seeing.run(seeing.place(image)).ids for image in (first, second, first)]
    assert said[0] == said[2] != said[1]


def test_the_same_image_hits_and_another_never_does(seeing: Seeing) -> None:
    """A prompt is reused up to its last token; after one changed value up to its image."""
    first, second = seeing.pictures
    placed = seeing.place(first)
    assert seeing.run(placed).reused == 0
    assert seeing.run(placed).reused == len(placed.ids) - 1
    for other in (change_value(first), second):
        assert seeing.run(seeing.place(other)).reused == len(PIECES[0])
    assert seeing.gallery.seen == 3


def test_a_chat_over_an_image_sees_it_once(seeing: Seeing) -> None:
    """Ten turns that go on from each other evaluate neither the image nor its places again."""
    first, _ = seeing.pictures
    placed, before = seeing.place(first), 0
    for turn in range(10):
        collected = seeing.run(placed, max_tokens=3)
        assert collected.reused >= before
        before = len(placed.ids)
        more = (*collected.ids, 40 + turn, 9)
        placed = Placed((*placed.ids, *more), (*placed.keys, *more), placed.images)
    assert seeing.gallery.seen == 1


def test_choices_over_an_image_see_it_once(seeing: Seeing) -> None:
    """Streams of one prompt that begin together: one pass of the tower for all of them."""
    placed = seeing.place(seeing.pictures[0])
    first, *others = seeing.run_together([placed] * 4)
    assert others == [first] * 3
    assert seeing.gallery.seen == 1


def test_features_are_kept_within_their_budget(seeing: Seeing) -> None:
    """Of more images than are kept those used longest ago go; each array is counted by name."""
    first, second = seeing.pictures
    for image in (first, second, change_value(first)):
        seeing.run(seeing.place(image))
    kept = seeing.gallery.arrays()
    assert len(kept) == 2
    sizes = seeing.gallery.sizes
    assert {array.nbytes for array in kept.values()} == {4 * sizes.tokens * sizes.hidden}
    seeing.gallery.clear()
    assert not seeing.gallery.arrays()


@dataclass(slots=True)
class Counted(Sighted):
    """A model that sees, and notes how many images' features there are when it is done."""

    model: Sighted
    held: Callable[[], int]
    most: int = 0

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """See, and count what there is beside."""
        self.most = max(self.most, self.held() + pixels.shape[0])
        return self.model.see(pixels, settings)


def test_room_is_made_before_an_image_is_seen(seeing: Seeing) -> None:
    """Features of no more images than are kept are there at any time, and what a pass needs of
    those that are kept is not dropped for it."""
    first, second = seeing.pictures
    gallery = seeing.gallery
    counted = gallery._model = Counted(gallery._model, lambda: len(gallery.arrays()))
    for image in (first, second, change_value(first)):
        seeing.run(seeing.place(image))
    assert counted.most == 2
    seeing.tiny.prefix.clear()
    seeing.run(seeing.place(second, before=(70,)))
    assert gallery.seen == 3


def test_rows_with_images_share_a_batch_with_text(seeing: Seeing) -> None:
    """Streams side by side, with one image, with two, and with none, say what they say alone."""
    first, second = seeing.pictures
    prompts = [
        seeing.place(first),
        seeing.place(second, first),
        Placed(PIECES[2], (), ()),
        seeing.place(second, before=(70,)),
    ]
    together = seeing.run_together(prompts)
    seeing.forget()
    assert together == [seeing.run(placed).ids for placed in prompts]


@pytest.mark.parametrize("by_steps", [True, False])
def test_a_stream_goes_on_from_its_images(seeing: Seeing, *, by_steps: bool) -> None:
    """Resumed after any of its tokens, from the request alone, it says what it would have said."""
    placed = seeing.place(*seeing.pictures)
    whole = seeing.run(placed, max_tokens=12)
    for cut in (1, 5, 11):
        said = seeing.resume(placed, whole, cut, by_steps=by_steps, max_tokens=12)
        assert said == whole.ids
