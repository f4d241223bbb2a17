"""The room in which images wait to be decoded: bounds, children that die, and what clients hear."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from mlxd_models.files.image_settings import read_image_settings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart
from mlxd_shared.domain.errors import InvalidRequest, QueueFull, ShuttingDown
from mlxd_worker.vision.room import ImageRoom
from mlxd_worker.vision.sight import Sight
from tests.support.seeing import (
    SIDE,
    TOKENS,
    change_pixel,
    encode_image,
    picture,
    write_image_settings,
)
from tests.worker.vision.test_decoding import png_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG_S = 60.0


@pytest.fixture(scope="module")
def sight(tmp_path_factory: pytest.TempPathFactory) -> Sight:
    """How a tiny model sees."""
    folder = write_image_settings(tmp_path_factory.mktemp("model"), SIDE)
    settings = read_image_settings(folder, side=SIDE)
    sizes = SightSizes(token_id=5, tokens=TOKENS, side=SIDE, hidden=8, pass_values=1)
    return Sight(sizes, settings)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def room() -> AsyncIterator[ImageRoom]:
    """One room for all: processes that were killed are replaced."""
    made_room = ImageRoom(limit_s=LONG_S)
    yield made_room
    await made_room.close()


def chat_of(*images: bytes) -> Chat:
    """Return a chat in which a user shows images, then says something."""
    parts = (*(ContentPart(image=image) for image in images), ContentPart("what is it?"))
    return Chat((ChatMessage("user", "hi"), ChatMessage("user", parts=parts)))


async def test_images_come_in_order_each_under_its_name(room: ImageRoom, sight: Sight) -> None:
    """Equal ones have one name; one pixel makes another; pixels are as many as the model sees."""
    image = picture(1)
    files = [encode_image(image), encode_image(picture(2)), encode_image(image, compress_level=1),
             encode_image(change_pixel(image))]  # fmt: skip
    read = await room.read(chat_of(*files), sight)
    first, second, again, other = read
    assert first == again
    assert len({first.name, second.name, other.name}) == 3
    assert {len(pixels.colours) for pixels in read} == {3 * SIDE * SIDE}
    assert await room.read(chat_of(), sight) == ()


async def test_a_bad_image_is_named(room: ImageRoom, sight: Sight) -> None:
    """By message and part; the next request is served by whoever is there."""
    for bad, words in ((b"nothing", "no image"), (png_of(9000, 9000), "pixels; at most")):
        with pytest.raises(InvalidRequest) as caught:
            await room.read(chat_of(encode_image(picture(1)), bad), sight)
        (violation,) = caught.value.violations
        assert violation.field == "chat.messages[1].parts[1].image"
        assert words in violation.description
    assert len(await room.read(chat_of(encode_image(picture(1))), sight)) == 1


@pytest.mark.parametrize(
    ("what", "limit_s", "words"),
    [("os._exit(1)", LONG_S, "more memory"), ("threading.Event().wait()", 0.5, "longer than")],
)
async def test_what_a_file_does_to_its_child_is_its_own_error(
    what: str, limit_s: float, words: str, sight: Sight
) -> None:
    """A child that dies of a file, or does not end, makes a refusal of that file's field."""
    program = f"import os, sys, threading; sys.stdin.buffer.readline(); {what}"
    room = ImageRoom(limit_s=limit_s, command=(sys.executable, "-c", program))
    with pytest.raises(InvalidRequest) as caught:
        await room.read(chat_of(encode_image(picture(1))), sight)
    await room.close()
    (violation,) = caught.value.violations
    assert violation.field == "chat.messages[1].parts[0].image"
    assert words in violation.description
    with pytest.raises(ShuttingDown):
        await room.read(chat_of(encode_image(picture(1))), sight)


async def test_pixels_are_counted_before_they_are_there(sight: Sight) -> None:
    """Room for two images is no room for a third, until a stream ends; nobody else needs any."""
    room = ImageRoom(held_nbytes_max=2 * sight.sizes.pixels_nbytes)
    three = [room.hold(1, sight) for _ in range(3)]
    with three[0], three[1], room.hold(5, None), pytest.raises(QueueFull), three[2]:
        pass
    assert room.held_nbytes == 0
    await room.close()


async def test_the_worker_itself_imports_no_decoder() -> None:
    """What the worker's process imports to have images decoded brings no Pillow."""
    program = "import sys, mlxd_worker.vision.room; sys.exit('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=False)  # noqa: ASYNC221
    assert done.returncode == 0
