"""Images in their own shapes in an engine: streams say what one pass over everything says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from mlxd_models.files.image_settings import ImageSettings, read_image_settings
from mlxd_worker.cache.base import RowId
from mlxd_worker.engine.axes import turns_of
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.models.base import Batch, Inlay, Model, Sighted
from mlxd_worker.tokenizing.files import load_tokenizer
from mlxd_worker.vision.sight import Placed, place_images
from tests.support.engines import Collected, TinyEngine, engine_on
from tests.support.qwen_vl_cases import CASES, GRIDS, PIECES, PLACE, Case
from tests.support.resuming import resumed_prompt
from tests.worker.tiny import caches_of, ints, load

CASE = CASES[0]
TOKENS = 12
Picture = tuple[bytes, tuple[int, int]]
"""Its pixels, and its rows and columns of places."""


@dataclass(slots=True)
class Seeing:
    """An engine that sees, and what it sees with."""

    tiny: TinyEngine
    gallery: Gallery
    model: Model
    settings: ImageSettings
    side: int = CASE.side
    """Side of a place, in pixels."""

    def place(self, *pictures: Picture, before: Sequence[int] = PIECES[0]) -> Placed:
        """Return a prompt of text, images with a token between, and text."""
        ids = list(before)
        for _ in pictures:
            ids += [PLACE, 17]
        named = [(blake2b(pixels + bytes(grid)).digest(), pixels) for pixels, grid in pictures]
        grids = [grid for _, grid in pictures]
        return place_images([*ids, *PIECES[3]], named, self.gallery.sizes, grids)

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
        side, inlays = self.side, []
        for image in placed.images:
            assert image.grid is not None
            rows, columns = image.grid
            pixels = mx.array(list(image.pixels), dtype=mx.uint8)
            shown = pixels.reshape(1, rows * side, columns * side, 3)
            inlays.append(Inlay(image.start, self.model.see(shown, self.settings)[0]))
        caches = caches_of(self.model, rows_max=1)
        caches.join(RowId(1), tokens=len(ids))
        turns = turns_of([(placed.images, 0, len(ids))])
        batch = replace(Batch.prefill(ids, 0, RowId(1)), inlays=tuple(inlays), turns=turns)
        logits = self.model.logits(self.model.forward(batch, caches)[-1:])
        return ints(mx.argmax(logits, axis=-1))[0]


@pytest.fixture
def seeing(tmp_path: Path) -> Seeing:
    """An engine on a tiny Qwen2.5-VL that keeps prefixes."""
    return seeing_of(CASE, tmp_path / "model")


def seeing_of(case: Case, folder: Path) -> Seeing:
    """Return an engine on a case's model that keeps prefixes."""
    model = load(case.write(folder))
    assert isinstance(model, Sighted)
    family = find_family(REGISTRY, architecture_of(case.config))
    sizes = family.footprint(family.parse(case.config)).sight
    assert sizes is not None
    settings = read_image_settings(folder, side=sizes.side, places_max=sizes.places_max)
    gallery = Gallery(model, sizes, settings, kept_max=2)
    tiny = engine_on(
        model, load_tokenizer(folder), rows_max=4, context_length=512, prefix_nbytes=1 << 24,
        chunk=6, gallery=gallery,
    )  # fmt: skip
    return Seeing(tiny, gallery, model, settings, case.side)


def pictures() -> list[Picture]:
    """Return three images of other shapes."""
    return [(each.tobytes(), grid) for each, grid in zip(CASE.pixels(), GRIDS, strict=True)]


def test_a_stream_says_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks and steps, with guesses and without, behind a former prompt and anew."""
    first, second, third = pictures()
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
    pixels, (rows, columns) = pictures()[0]
    placed = seeing.place((pixels, (rows, columns)))
    seeing.run(placed)
    other = seeing.place((pixels, (columns, rows)))
    answer = seeing.run(other)
    assert answer.reused == len(PIECES[0])
    assert answer.ids == seeing.expect(other)


def test_at_another_place_an_image_is_read_anew(seeing: Seeing) -> None:
    """Behind other text, or as the second image, its keys and values are not those of before; the
    tower need not see it again."""
    first, second, _ = pictures()
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
    first, second, third = pictures()
    prompts = [
        seeing.place(first),
        seeing.place(second, third),
        Placed(PIECES[3], (), ()),
        seeing.place(third, before=(70,)),
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
    placed = seeing.place(*pictures()[:2])
    whole = seeing.run(placed)
    for cut in (1, 5, 11):
        seeing.tiny.prefix.clear()
        seeing.gallery.clear()
        resumed = resumed_prompt(placed.ids, whole, cut, by_steps=by_steps)
        keys = placed.keys if by_steps else (*placed.keys, *whole.ids[:cut])
        rest = seeing.run(placed, keys=keys, **resumed)
        assert [*whole.ids[:cut], *rest.ids] == whole.ids


def test_images_of_other_sizes_are_seen_one_by_one(seeing: Seeing) -> None:
    """Each array of features is as large as its image has places, and is counted by name."""
    first, second, third = pictures()
    seeing.run(seeing.place(first, second, third))
    hidden = seeing.gallery.sizes.hidden
    kept = sorted(array.nbytes for array in seeing.gallery.arrays().values())
    assert kept == sorted(4 * hidden * rows * columns for rows, columns in GRIDS[1:])
    assert seeing.gallery.sizes.together == 1
    seeing.gallery.warm_up()
    assert not seeing.gallery.arrays()
