"""Images that no pass may cut, in an engine: streams say what one pass over everything says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.registry import REGISTRY
from mlxd_models.files.image_settings import ImageSettings, read_image_settings
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.prefix.images import points_beside_images
from mlxd_worker.cache.prefix.trie_node import key_of
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.engine.stepping.spans import lasts_of
from mlxd_worker.models.base import Batch, Inlay, Model, Sighted
from mlxd_worker.tokenizing.files import load_tokenizer
from mlxd_worker.vision.sight import Placed, key_of_image, place_images
from tests.support.engines import Collected, TinyEngine, engine_on
from tests.support.gemma3_cases import BEFORE, BEHIND, CASES, PLACE, Case
from tests.support.resuming import resumed_prompt
from tests.worker.tiny import caches_of, ints, load

TOKENS = 8
HEAD, TAIL = (77, 41, 8), (33, 12, 200, 150, 61, 9)
LONG = tuple(range(20, 80))
"""Text behind which the next point at which states are kept, 64, is within an image."""


@dataclass(slots=True)
class Seeing:
    """An engine that sees, and what it sees with."""

    case: Case
    tiny: TinyEngine
    gallery: Gallery
    model: Model
    settings: ImageSettings

    def place(self, *pictures: bytes, before: Sequence[int] = HEAD) -> Placed:
        """Return a prompt of text, images as a processor writes them, and text."""
        ids = list(before)
        for _ in pictures:
            ids += [BEFORE, PLACE, BEHIND]
        named = [(blake2b(pixels).digest(), pixels) for pixels in pictures]
        return place_images([*ids, *TAIL], named, self.gallery.sizes)

    def run(self, placed: Placed, **options: Any) -> Collected:
        """Run one stream with these images to its end."""
        return self.tiny.alone(
            **{
                "prompt": placed.ids, "images": placed.images, "keys": placed.keys,
                "max_tokens": TOKENS, **options,
            }
        )  # fmt: skip

    def expect(self, placed: Placed) -> list[int]:
        """Return what one pass over the prompt and all before says, token by token."""
        said: list[int] = []
        for _ in range(TOKENS):
            said.append(self._next((*placed.ids, *said), placed))
        return said

    def _next(self, ids: tuple[int, ...], placed: Placed) -> int:
        assert isinstance(self.model, Sighted)
        side, inlays = self.case.side, []
        for image in placed.images:
            pixels = mx.array(list(image.pixels), dtype=mx.uint8).reshape(1, side, side, 3)
            inlays.append(Inlay(image.start, self.model.see(pixels, self.settings)[0]))
        caches = caches_of(self.model, rows_max=1)
        caches.join(RowId(1), tokens=len(ids))
        lasts = lasts_of([(placed.images, 0, len(ids))])
        batch = replace(Batch.prefill(ids, 0, RowId(1)), inlays=tuple(inlays), lasts=lasts)
        logits = self.model.logits(self.model.forward(batch, caches)[-1:])
        return ints(mx.argmax(logits, axis=-1))[0]

    def pictures(self) -> list[bytes]:
        """Return two images' pixels, and the first with one value changed by one."""
        first, second = (picture.tobytes() for picture in self.case.pixels())
        return [first, second, bytes([first[0] ^ 1]) + first[1:]]


@pytest.fixture(params=["windows", "all-full"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Seeing:
    """An engine on a tiny Gemma 3 whose chunks are shorter than an image; it keeps prefixes."""
    case = next(case for case in CASES if case.name == request.param)
    folder = case.write(tmp_path / "model")
    model = load(folder)
    assert isinstance(model, Sighted)
    family = REGISTRY["Gemma3ForConditionalGeneration"]
    sizes = family.footprint(family.parse(case.config)).sight
    assert sizes is not None
    settings = read_image_settings(folder, side=sizes.side, tokens=sizes.tokens)
    gallery = Gallery(model, sizes, settings, kept_max=2)
    tiny = engine_on(
        model, load_tokenizer(folder), rows_max=4, context_length=512, prefix_nbytes=1 << 24,
        chunk=6, gallery=gallery,
    )  # fmt: skip
    return Seeing(case, tiny, gallery, model, settings)


def test_a_stream_says_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks and steps, with guesses and without, behind a former prompt and anew."""
    first, second, _ = seeing.pictures()
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
    first, second, changed = seeing.pictures()
    seeing.run(seeing.place(first, before=LONG))
    for other in (second, changed):
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
    first, second, _ = seeing.pictures()
    prompts = [
        seeing.place(first),
        seeing.place(second, first),
        Placed(TAIL, (), ()),
        seeing.place(second, before=(70, *LONG)),
    ]
    sinks = [
        seeing.tiny.submit(placed.ids, images=placed.images, keys=placed.keys, max_tokens=TOKENS)[1]
        for placed in prompts
    ]
    seeing.tiny.run()
    assert [sink.ids for sink in sinks] == [seeing.expect(placed) for placed in prompts]


@pytest.mark.parametrize("by_steps", [True, False])
def test_a_stream_goes_on_behind_its_images(seeing: Seeing, *, by_steps: bool) -> None:
    """Resumed after any of its tokens, from the request alone, it says what it would have said."""
    placed = seeing.place(*seeing.pictures()[:2])
    whole = seeing.run(placed)
    for cut in (1, 5, 7):
        seeing.tiny.prefix.clear()
        seeing.gallery.clear()
        resumed = resumed_prompt(placed.ids, whole, cut, by_steps=by_steps)
        keys = placed.keys if by_steps else (*placed.keys, *whole.ids[:cut])
        rest = seeing.run(placed, keys=keys, **resumed)
        assert [*whole.ids[:cut], *rest.ids] == whole.ids


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
