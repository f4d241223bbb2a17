"""Ten real pictures through each processor: pixels and places are those that transformers makes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlxd_worker.models.layers.tower import scale_pixels
from mlxd_worker.vision.asking import grid_of
from mlxd_worker.vision.decoding import Target, decode_image
from mlxd_worker.vision.sight import Sight
from tests.support.real_pictures import FOLDER, PICTURES, PROCESSORS, Processor

ROUNDING = 1e-5


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.name)
def test_pictures_are_seen_as_transformers_sees_them(processor: Processor, tmp_path: Path) -> None:
    """As many places, and every value of every pixel, scaled and shifted, within one step of 8
    bits; the settings are read from the file that a model would have."""
    sizes, settings = processor.sizes(), processor.read(tmp_path)
    target = Target(**Sight(sizes, settings).target)
    step = settings.scale / min(settings.deviation) + ROUNDING
    counts = set()
    for picture in PICTURES:
        expected = processor.reference(picture)
        _, shown = decode_image((FOLDER / picture).read_bytes(), "", target)
        grid, colours = grid_of(shown) if sizes.varies else ((1, 1), shown)
        tokens = grid[0] * grid[1] if sizes.varies else sizes.tokens
        assert tokens == expected.tokens, picture
        shape = (grid[0] * sizes.side, grid[1] * sizes.side, 3)
        pixels = mx.array(np.frombuffer(colours, np.uint8).reshape(shape))
        made = np.array(scale_pixels(pixels, settings))
        assert made.shape == expected.pixels.shape, picture
        assert np.abs(made - expected.pixels).max() <= step, picture
        counts.add(tokens)
    assert (len(counts) > len(PICTURES) // 2) is sizes.varies


def test_the_pictures_differ_in_what_decoders_meet() -> None:
    """Formats, colours, a camera's turn, transparency, and sides twenty times as long as others."""
    modes, formats, turned, ratios = set(), set(), 0, []
    for picture in PICTURES:
        with Image.open(FOLDER / picture) as image:
            modes.add(image.mode)
            formats.add(image.format)
            turned += image.getexif().get(0x0112, 1) != 1
            ratios.append(image.width / image.height)
    assert len(PICTURES) == 10
    assert modes == {"RGB", "RGBA", "P", "L"}
    assert formats == {"PNG", "JPEG", "WEBP"}
    assert turned == 1
    assert max(ratios) > 20
    assert min(ratios) < 1 / 20
