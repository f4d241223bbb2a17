"""Images that keep their shape: pixels and places as transformers has them, and what is refused."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlxd_models.files.image_settings import Growth, read_image_settings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared import config
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.cache.prefix.images import OF_IMAGE
from mlxd_worker.vision.asking import grid_bytes, grid_of
from mlxd_worker.vision.decoding import ASPECT_MAX, Refused, Target, decode_image, shaped_size
from mlxd_worker.vision.room import ImageRoom
from mlxd_worker.vision.sight import Sight, place_images
from tests.support.seeing import encode_image, picture
from tests.support.seeing_shapes import (
    MERGE,
    PATCH,
    PLACES_MAX,
    SIDE,
    shaped_settings,
    write_shaped_settings,
)
from tests.support.tiny_model import write_json

TARGET = Target(SIDE, None, 3, 4 * SIDE * SIDE, PLACES_MAX * SIDE * SIDE)
SIZES = ((24, 24), (31, 40), (200, 37), (9, 80), (333, 250), (24, 300), (5, 5), (64, 63), (1, 1),
         (641, 480), (1, 150), (12, 20), (20, 12), (36, 44))  # fmt: skip
SIGHT_SIZES = SightSizes(
    token_id=5, tokens=config.IMAGE_PLACES_MAX, side=SIDE, hidden=8, pass_values=1, varies=True
)


def transformers_pixels(
    image: Image.Image, patch: int = PATCH, **sizes: Any
) -> tuple[np.ndarray[Any, Any], tuple[int, int]]:
    """Return 8-bit pixels, rows and columns of places as transformers' own processor makes them.

    patch: its side. sizes: what else the processor's file says of sizes.
    """
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen  # noqa: PLC0415

    settings = shaped_settings(MERGE * patch) | {"do_rescale": False, "do_normalize": False}
    if sizes:
        del settings["min_pixels"], settings["max_pixels"]
    del settings["image_processor_type"]
    made = qwen.Qwen2VLImageProcessorPil(**settings | sizes)(image, return_tensors="np")
    ((frames, height, width),) = np.asarray(made["image_grid_thw"]).tolist()
    assert frames == 1
    rows, columns = height // MERGE, width // MERGE
    shape = (rows, columns, MERGE, MERGE, 3, 2, patch, patch)
    patches = np.asarray(made["pixel_values"]).reshape(shape)
    assert (patches[:, :, :, :, :, 0] == patches[:, :, :, :, :, 1]).all()
    upright = patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    side = MERGE * patch
    return upright.reshape(rows * side, columns * side, 3), (rows, columns)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_places_equal_transformers(size: tuple[int, int]) -> None:
    """Of every shape, wide, tall and tiny: as many places, and within one step of 8 bits."""
    image = picture(3, width=size[0], height=size[1])
    expected, places = transformers_pixels(image)
    _, shown = decode_image(encode_image(image), "", TARGET)
    grid, colours = grid_of(shown)
    assert grid == places
    made = np.frombuffer(colours, np.uint8).reshape(expected.shape)
    assert np.abs(made.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("size", [(641, 480), (90, 800), (31, 40)])
def test_pixels_by_edges_equal_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    """As Qwen3-VL's and Qwen3.5's files say it: patches of 16, and sizes as edges that are numbers
    of pixels."""
    edges = {"shortest_edge": 65_536, "longest_edge": 262_144}
    image, side = picture(7, width=size[0], height=size[1]), 16 * MERGE
    expected, places = transformers_pixels(image, 16, size=edges)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "size": edges, "patch_size": 16,
        "merge_size": MERGE, "temporal_patch_size": 2, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }  # fmt: skip
    write_json(tmp_path / "preprocessor_config.json", settings)
    read = read_image_settings(tmp_path, side=side, places_max=config.IMAGE_PLACES_MAX)
    assert (read.pixels_min, read.pixels_max) == (65_536, 262_144)
    sizes = replace(SIGHT_SIZES, side=side)
    _, shown = decode_image(encode_image(image), "", Target(**Sight(sizes, read).target))
    grid, colours = grid_of(shown)
    assert grid == places
    made = np.frombuffer(colours, np.uint8).reshape(expected.shape)
    assert np.abs(made.astype(int) - expected.astype(int)).max() <= 1


GROWING = ((5, 5), (1, 1), (3, 70), (70, 3), (7, 40), (40, 7), (8, 3), (31, 40), (641, 480),
           (7, 7))  # fmt: skip


@pytest.mark.parametrize("growth", [Growth.WHOLE, Growth.BY_SIDE])
@pytest.mark.parametrize("size", GROWING)
def test_narrow_images_grow_as_their_processors_have_it(
    size: tuple[int, int], growth: Growth
) -> None:
    """GLM's until both sides are a place's, PaddleOCR-VL's side by side; then as all others."""
    from transformers.models.glm46v import image_processing_pil_glm46v as glm  # noqa: PLC0415
    from transformers.models.paddleocr_vl import (  # noqa: PLC0415
        image_processing_pil_paddleocr_vl as paddle,
    )

    width, height = size
    least, most = 4 * SIDE**2, PLACES_MAX * SIDE**2
    if growth is Growth.WHOLE:
        rows, columns = glm.smart_resize(
            2, height, width, factor=SIDE, min_pixels=2 * least, max_pixels=2 * most
        )
    else:
        rows, columns = paddle.smart_resize(
            height, width, factor=SIDE, min_pixels=least, max_pixels=most
        )
    target = replace(TARGET, growth=growth.value)
    assert shaped_size(width, height, target) == (columns, rows)


def test_a_shape_beyond_bounds_is_refused() -> None:
    """One side too long for the other, as the processor refuses it; and so long that one row of
    places is more than an image may have."""
    most = ASPECT_MAX * 3
    assert shaped_size(3, most, TARGET)[1] > SIDE
    for width, height in ((3, most + 1), (most + 1, 3)):
        with pytest.raises(Refused, match=f"{width} x {height} pixels: too long for its width"):
            shaped_size(width, height, TARGET)
    few = Target(SIDE, None, 3, 1, 8 * SIDE * SIDE, places_max=8)
    with pytest.raises(Refused, match="takes 15 tokens; an image takes at most 8"):
        shaped_size(10, 300, few)


@pytest.mark.parametrize("bound", [None, 1024])
def test_least_pixels_that_are_the_most_places_are_not_rounded_beyond(bound: int | None) -> None:
    """Files that want more pixels than an image may have, or than its model's tower sees."""
    most = bound or config.IMAGE_PLACES_MAX
    pixels = most * SIDE * SIDE
    target = Target(SIDE, None, 3, pixels, pixels, places_max=bound)
    root = round(most**0.5)
    assert shaped_size(8, 8, target) == (root * SIDE, root * SIDE)
    for width, height in ((8, 9), (500, 700), (31, 3000)):
        columns, rows = (each // SIDE for each in shaped_size(width, height, target))
        assert 0.85 * most < rows * columns <= most


def test_a_large_picture_is_made_smaller(tmp_path_factory: pytest.TempPathFactory) -> None:
    """To the most places that an image takes, whatever more its files allow; its shape stays."""
    wanted = 4 * config.IMAGE_PLACES_MAX
    folder = write_shaped_settings(tmp_path_factory.mktemp("model"), max_pixels=wanted * SIDE**2)
    settings = read_image_settings(folder, side=SIDE, places_max=config.IMAGE_PLACES_MAX)
    target = Target(**Sight(SIGHT_SIZES, settings).target)
    width, height = shaped_size(1024, 2048, target)
    assert (width * height) // SIDE**2 <= config.IMAGE_PLACES_MAX
    assert height == pytest.approx(2 * width, abs=2 * SIDE)
    assert width * height > 0.9 * config.IMAGE_PLACES_MAX * SIDE**2


def chat_of(*images: bytes) -> Chat:
    """Return a chat in which a user shows images."""
    parts = (*(ContentPart(image=image) for image in images), ContentPart("what is it?"))
    return Chat((ChatMessage("user", parts=parts),))


@pytest.mark.asyncio
async def test_rows_and_columns_come_with_pixels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Through a child: each image has its own, as many pixels as these, and a name of its own."""
    folder = write_shaped_settings(tmp_path_factory.mktemp("model"))
    settings = read_image_settings(folder, side=SIDE, places_max=SIGHT_SIZES.places_max)
    sight, room = Sight(SIGHT_SIZES, settings), ImageRoom()
    sizes = ((31, 40), (80, 24), (31, 40))
    files = [encode_image(picture(1, width=width, height=height)) for width, height in sizes]
    tall, wide, again = await room.read(chat_of(*files), sight)
    await room.close()
    assert (tall.grid, wide.grid) == ((5, 4), (2, 8))
    assert tall == again
    assert tall.name != wide.name
    for pixels in (tall, wide):
        assert pixels.grid is not None
        rows, columns = pixels.grid
        assert len(pixels.colours) == 3 * rows * columns * SIDE**2


LIAR = """
import sys
from mlxd_worker.killable.process import serve

def answer_to(question):
    return b"+" + bytes(32) + question.rpartition(b"\\n")[2]

serve(answer_to, limit_s=60, memory_nbytes_max=1 << 32)
"""


@pytest.mark.asyncio
async def test_a_decoder_that_lies_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Rows and columns that are none, too many, or not those of the pixels behind them."""
    folder = write_shaped_settings(tmp_path_factory.mktemp("model"))
    settings = read_image_settings(folder, side=SIDE, places_max=SIGHT_SIZES.places_max)
    room = ImageRoom(command=(sys.executable, "-c", LIAR))
    one = bytes(3 * SIDE * SIDE)
    lies = [
        b"",
        b"x",
        grid_bytes(0, 7),
        grid_bytes(1, 2) + one,
        grid_bytes(1, 1) + one[1:],
        grid_bytes(1 << 31, 1 << 31) + one,
        struct.pack("<II", config.IMAGE_PLACES_MAX, 2),
    ]
    for lie in lies:
        with pytest.raises(InvalidRequest, match="answered nonsense") as caught:
            await room.read(chat_of(lie or b"\n"), Sight(SIGHT_SIZES, settings))
        assert caught.value.violations[0].field == "chat.messages[0].parts[0].image"
    (pixels,) = await room.read(chat_of(grid_bytes(1, 1) + one), Sight(SIGHT_SIZES, settings))
    assert pixels.grid == (1, 1)
    await room.close()


def test_each_image_takes_its_own_places() -> None:
    """As many tokens and keys as it has rows and columns; rows and columns go with it."""
    images = [(b"a" * 32, b"pixels a"), (b"b" * 32, b"pixels b")]
    placed = place_images([1, 5, 2, 5, 9], images, SIGHT_SIZES, [(2, 3), (1, 1)])
    assert placed.ids == (1, *[5] * 6, 2, 5, 9)
    assert [(image.start, image.tokens, image.grid) for image in placed.images] == [
        (1, 6, (2, 3)), (8, 1, (1, 1)),
    ]  # fmt: skip
    assert [bool(key & OF_IMAGE) for key in placed.keys] == [id_ == 5 for id_ in placed.ids]
