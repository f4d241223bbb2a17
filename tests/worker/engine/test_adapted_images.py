"""Images through mlx-vlm in an engine: streams say what one pass over everything says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.files.image_settings import ImageSettings, read_image_settings
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.models.base import Model, Sighted
from mlxd_worker.models.loader import inspect_model
from mlxd_worker.tokenizing.files import load_tokenizer
from mlxd_worker.vision.sight import Placed, place_images
from tests.support.engines import Collected, TinyEngine, engine_on
from tests.support.resuming import resumed_prompt
from tests.support.tiny_model import write_tiny_model
from tests.worker.tiny import caches_of, ints, load
from tests.worker.vlm import CASES, GRIDS, PIECES, Case, Shown, read_prompt
from tests.worker.vlm_configs import END, PLACE, START

TOKENS = 9
KINDS = {case.kind: case for case in CASES if case.name == "plain"}
Picture = tuple[bytes, tuple[int, int]]
"""Its pixels, and its rows and columns of places."""


@dataclass(slots=True)
class Seeing:
    """An engine that sees, and what it sees with."""

    tiny: TinyEngine
    gallery: Gallery
    model: Model
    settings: ImageSettings
    case: Case

    def place(self, *pictures: Picture, before: Sequence[int] = PIECES[0]) -> Placed:
        """Return a prompt of text, images with a token between, and text."""
        ids = list(before)
        for _ in pictures:
            ids += [START, PLACE, END]
        named = [(blake2b(pixels + bytes(grid)).digest(), pixels) for pixels, grid in pictures]
        grids = [grid for _, grid in pictures]
        return place_images([*ids, *PIECES[3]], named, self.gallery.sizes, grids)

    def run(self, placed: Placed, **options: Any) -> Collected:
        """Run one stream with these images to its end."""
        return self.tiny.alone(
            **{
                "prompt": placed.ids,
                "images": placed.images,
                "keys": placed.keys,
                "max_tokens": TOKENS,
                **options,
            }
        )

    def expect(self, placed: Placed) -> list[int]:
        """Return what one pass over the prompt and all before says, token by token."""
        said: list[int] = []
        features = tuple(self._see(image.pixels, image.grid) for image in placed.images)
        for _ in range(TOKENS):
            shown = Shown((*placed.ids, *said), placed.images, features)
            logits = read_prompt(self.model, caches_of(self.model), shown, [len(shown.prompt)])
            said.append(ints(mx.argmax(logits[-1:], axis=-1))[0])
        return said

    def _see(self, pixels: bytes | memoryview, grid: tuple[int, int] | None) -> mx.array:
        assert isinstance(self.model, Sighted)
        assert grid is not None
        rows, columns = (count * self.case.side for count in grid)
        shown = mx.array(list(pixels), dtype=mx.uint8).reshape(1, rows, columns, 3)
        return self.model.see(shown, self.settings)[0]

    def pictures(self) -> list[Picture]:
        """Return three images of other shapes."""
        return [
            (each.tobytes(), grid) for each, grid in zip(self.case.pixels(), GRIDS, strict=True)
        ]


@pytest.fixture(params=["qwen2_vl", "dots_ocr"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Seeing:
    """An engine that keeps prefixes, on a type that turns by axes and on one that does not."""
    case = KINDS[request.param]
    folder = case.write(tmp_path / "model")
    model, sizes = load(folder), inspect_model(folder).footprint.sight
    assert isinstance(model, Sighted)
    assert sizes is not None
    settings = read_image_settings(folder, side=sizes.side, places_max=sizes.places_max)
    gallery = Gallery(model, sizes, settings, kept_max=2)
    tokenizer = load_tokenizer(write_tiny_model(tmp_path / "words"))
    tiny = engine_on(
        model, tokenizer, rows_max=4, context_length=256, prefix_nbytes=1 << 24, chunk=6,
        gallery=gallery,
    )  # fmt: skip
    return Seeing(tiny, gallery, model, settings, case)


def test_streams_say_what_one_pass_says(seeing: Seeing) -> None:
    """In chunks and steps, behind a former prompt, after one changed value, and resumed from the
    request alone after any token."""
    first, second, _ = seeing.pictures()
    placed = seeing.place(first, second)
    expected = seeing.expect(placed)
    whole = seeing.run(placed)
    assert whole.ids == expected
    assert seeing.gallery.seen == 2
    again = seeing.run(placed)
    assert (again.ids, again.reused) == (expected, len(placed.ids) - 1)
    assert seeing.gallery.seen == 2
    changed = seeing.place((bytes([first[0][0] ^ 255]) + first[0][1:], first[1]), second)
    other = seeing.run(changed)
    assert (other.reused, other.ids) == (len(PIECES[0]) + 1, seeing.expect(changed))
    for cut in (1, 4, 8):
        seeing.tiny.prefix.clear()
        seeing.gallery.clear()
        resumed = resumed_prompt(placed.ids, whole, cut, by_steps=True)
        rest = seeing.run(placed, keys=placed.keys, **resumed)
        assert [*whole.ids[:cut], *rest.ids] == expected


def test_rows_with_images_share_steps_with_text(seeing: Seeing) -> None:
    """Streams side by side, of other shapes and of none, say what each says alone; features are
    counted by name, and no more are kept than may be."""
    first, second, third = seeing.pictures()
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
    kept = seeing.gallery.arrays()
    assert len(kept) == 2
    hidden = seeing.gallery.sizes.hidden
    places = {4 * hidden * rows * columns for rows, columns in GRIDS}
    assert {array.nbytes for array in kept.values()} <= places
    seeing.gallery.warm_up()
    assert not seeing.gallery.arrays()
