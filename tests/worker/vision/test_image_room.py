"""The room in which images wait to be decoded: bounds, children that die, and what clients hear."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from mlxd_models.files.image_settings import read_image_settings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared import config
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart
from mlxd_shared.domain.errors import InvalidRequest, QueueFull, ShuttingDown
from mlxd_worker.vision.room import ImageRoom
from mlxd_worker.vision.sight import Sight
from tests.support.broken_pictures import png_of
from tests.support.seeing import (
    SIDE,
    TOKENS,
    change_pixel,
    encode_image,
    picture,
    write_image_settings,
)

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
    made_room = ImageRoom(limit_s=LONG_S, all_limit_s=16 * LONG_S)
    yield made_room
    await made_room.close()


def chat_of(*images: bytes) -> Chat:
    """Return a chat in which a user shows images, then says something."""
    parts = (*(ContentPart(image=image) for image in images), ContentPart("what is it?"))
    return Chat((ChatMessage("user", "hi"), ChatMessage("user", parts=parts)))


async def until(happened: Callable[[], bool]) -> None:
    """Wait for what other threads and processes bring about."""
    stops_s = time.monotonic() + LONG_S

    def wait() -> None:
        while not happened() and time.monotonic() < stops_s:
            os.sched_yield()

    await asyncio.to_thread(wait)
    assert happened()


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


PICKY = """
import threading
from mlxd_worker.killable.process import serve

def answer_to(question):
    if question.endswith(b"hang"):
        threading.Event().wait()
    return b"-read"

serve(answer_to, limit_s=600, memory_nbytes_max=1 << 40)
"""
"""Refuses every file but one, of which it finds no end."""


async def test_who_leaves_ends_the_decoding_of_its_images(sight: Sight) -> None:
    """Where all turns are those of streams that left, the next one has one at once, and no pixel is
    counted any more; nor for one that left while it waited."""
    command = (sys.executable, "-c", PICKY)
    room = ImageRoom(limit_s=2 * LONG_S, all_limit_s=2 * LONG_S, command=command)

    async def stream(image: bytes) -> None:
        with room.hold(1, sight):
            await room.read(chat_of(image), sight)

    count = config.IMAGE_READS_MAX + 1
    streams = [asyncio.create_task(stream(b"hang")) for _ in range(count)]
    await until(lambda: len(room._children._children) == config.IMAGE_READS_MAX)
    for each in streams:
        each.cancel()
    await asyncio.wait(streams)
    with pytest.raises(InvalidRequest, match="read"):
        await asyncio.wait_for(stream(b"other"), LONG_S)
    await until(lambda: not room.held_nbytes)
    await room.close()


async def test_a_requests_images_have_one_time_for_all(sight: Sight) -> None:
    """However many there are and whatever each may take; the image that is at it is named."""
    command = (sys.executable, "-c", PICKY)
    room = ImageRoom(limit_s=LONG_S, all_limit_s=0.5, command=command)
    with pytest.raises(InvalidRequest, match="images take longer than"):
        await room.read(chat_of(b"hang"), sight)
    await room.close()


async def test_children_rest_when_no_image_comes(sight: Sight) -> None:
    """After a while without one they end; the next image has another."""
    room = ImageRoom(limit_s=LONG_S, all_limit_s=LONG_S, idle_s=0.0)
    for _ in range(2):
        assert len(await room.read(chat_of(encode_image(picture(1))), sight)) == 1
        await until(lambda: not room._children._children)
    await room.close()


async def test_so_many_wait_and_no_more(sight: Sight) -> None:
    """Beyond those that are decoded and those that may wait a request is refused."""
    room = ImageRoom(waiting_max=1, limit_s=LONG_S, command=(sys.executable, "-c", PICKY))
    reads = [
        asyncio.create_task(room.read(chat_of(b"hang"), sight))
        for _ in range(config.IMAGE_READS_MAX + 1)
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await room.read(chat_of(b"other"), sight)
    for each in reads:
        each.cancel()
    await asyncio.wait(reads)
    await room.close()


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
