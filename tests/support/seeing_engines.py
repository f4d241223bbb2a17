"""An engine on a tiny model that sees, prompts with images for it, and what it has to say.

What is expected of a stream is the model's own: of each token one pass over all that is before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxd_models.files.image_settings import ImageSettings
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.engine.request import Image
from mlxd_worker.models.base import Model, Sighted
from mlxd_worker.models.loader import inspect_model
from mlxd_worker.tokenizing.files import load_tokenizer
from mlxd_worker.vision.sight import Placed, place_images, read_sight
from tests.support.engines import Collected, TinyEngine, engine_on
from tests.support.resuming import resumed_prompt
from tests.support.shown import SeenCase, Shown, read_whole
from tests.worker.tiny import ints, load

Picture = tuple[bytes, tuple[int, int] | None]
"""Its pixels, and its rows and columns of places; None: it is a square as all others."""


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around images in the prompts of a test."""

    before: tuple[int, ...]
    image: tuple[int, ...]
    """What stands for an image: its place, and the tokens beside it."""
    behind: tuple[int, ...]


@dataclass(slots=True)
class Seeing:
    """An engine that sees, and what it sees with."""

    tiny: TinyEngine
    gallery: Gallery
    model: Model
    settings: ImageSettings
    around: Around
    pictures: list[Picture]
    """Those of its case."""
    tokens_max: int
    """How many a stream says."""

    def place(self, *pictures: Picture, before: Sequence[int] | None = None) -> Placed:
        """Return a prompt of text, images, and text; before: other text than `around` has."""
        first = self.around.before if before is None else before
        ids = [*first, *self.around.image * len(pictures), *self.around.behind]
        grids = [grid for _, grid in pictures]
        named = [(blake2b(each + bytes(grid or ())).digest(), each) for each, grid in pictures]
        return place_images(ids, named, self.gallery.sizes, grids)

    def run(self, placed: Placed, **options: Any) -> Collected:
        """Run one stream with these images to its end."""
        return self.tiny.alone(**(_request(placed, self.tokens_max) | options))

    def run_together(self, prompts: Sequence[Placed]) -> list[list[int]]:
        """Return what streams say that begin together."""
        sinks = [self.tiny.submit(**_request(placed, self.tokens_max))[1] for placed in prompts]
        self.tiny.run()
        return [sink.ids for sink in sinks]

    def resume(
        self, placed: Placed, whole: Collected, cut: int, *, by_steps: bool, **options: Any
    ) -> list[int]:
        """Return what a stream says that is cut and goes on from the request alone.

        by_steps: it repeats what was said token by token, rather than reading it.
        """
        self.forget()
        resumed = resumed_prompt(placed.ids, whole, cut, by_steps=by_steps)
        keys = placed.keys if by_steps else (*placed.keys, *whole.ids[:cut])
        return [*whole.ids[:cut], *self.run(placed, keys=keys, **resumed, **options).ids]

    def forget(self) -> None:
        """Keep no prefixes and no features."""
        self.tiny.prefix.clear()
        self.gallery.clear()

    def expect(self, placed: Placed) -> list[int]:
        """Return what one pass over the prompt and all before says, token by token."""
        features = tuple(self._see(image) for image in placed.images)
        said: list[int] = []
        for _ in range(self.tokens_max):
            logits = read_whole(self.model, Shown((*placed.ids, *said), placed.images, features))
            said += ints(mx.argmax(logits[-1:], axis=-1))
        return said

    def _see(self, image: Image) -> mx.array:
        assert isinstance(self.model, Sighted)
        rows, columns = (count * self.gallery.sizes.side for count in image.grid or (1, 1))
        pixels = mx.array(list(image.pixels), dtype=mx.uint8).reshape(1, rows, columns, 3)
        return self.model.see(pixels, self.settings)[0]


def _request(placed: Placed, tokens_max: int) -> dict[str, Any]:
    return {
        "prompt": placed.ids, "images": placed.images, "keys": placed.keys,
        "max_tokens": tokens_max,
    }  # fmt: skip


def change_value(picture: Picture, *, by: int = 1) -> Picture:
    """Return a picture whose first value is another."""
    pixels, grid = picture
    return bytes([pixels[0] ^ by, *pixels[1:]]), grid


def seeing_engine(
    case: SeenCase,
    folder: Path,
    around: Around,
    *,
    tokens_max: int,
    words: Path | None = None,
    context_length: int = 512,
) -> Seeing:
    """Return an engine on a case's model that keeps prefixes, and features of two images.

    folder: where the model is written. words: where its tokenizer is, if elsewhere.
    """
    model = load(folder)
    sight = read_sight(folder, inspect_model(folder).footprint.sight)
    assert isinstance(model, Sighted)
    assert sight is not None
    gallery = Gallery(model, sight.sizes, sight.settings, kept_max=2)
    tiny = engine_on(
        model, load_tokenizer(words or folder), rows_max=4, context_length=context_length,
        prefix_nbytes=1 << 24, chunk=6, gallery=gallery,
    )  # fmt: skip
    grids = [image.grid for image in case.images]
    pictures = [(each.tobytes(), grid) for each, grid in zip(case.pixels(), grids, strict=True)]
    return Seeing(tiny, gallery, model, sight.settings, around, pictures, tokens_max)
