"""Streams that show the same images share one decoding, and one set of pixels, while they last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mlxd_models.files.image_settings import read_image_settings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart, chat_images
from mlxd_shared.domain.errors import InvalidRequest, QueueFull
from mlxd_worker.vision.room import ImageRoom, Pixels
from mlxd_worker.vision.showings import Showings, key_of
from mlxd_worker.vision.sight import Sight
from tests.support.seeing import (
    SIDE,
    TOKENS,
    encode_image,
    picture,
    write_image_settings,
)

LONG_S = 60.0


@pytest.fixture(name="sight", scope="module")
def read_sight(tmp_path_factory: pytest.TempPathFactory) -> Sight:
    """How a tiny model sees."""
    folder = write_image_settings(tmp_path_factory.mktemp("model"), SIDE)
    settings = read_image_settings(folder, side=SIDE)
    sizes = SightSizes(token_id=5, tokens=TOKENS, side=SIDE, hidden=8, pass_values=1)
    return Sight(sizes, settings)


def chat_of(*images: bytes, before: int = 0) -> Chat:
    """Return a chat that shows images, behind so many messages."""
    parts = tuple(ContentPart(image=image) for image in images)
    said = (ChatMessage("user", "hi"),) * before
    return Chat((*said, ChatMessage("user", parts=(*parts, ContentPart("what?")))))


@dataclass(slots=True)
class Scripted:
    """A room that decodes when a test lets it, and counts."""

    begun: int = 0
    cancelled: int = 0
    held: int = 0
    fault: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    held_max: int = 10

    @contextmanager
    def hold(self, images: int, _sight: Sight) -> Iterator[None]:
        """Count the images that have room."""
        if self.held + images > self.held_max:
            raise QueueFull("bytes of decoded images", self.held_max, 1.0)
        self.held += images
        try:
            yield
        finally:
            self.held -= images

    async def read(self, chat: Chat, _sight: Sight) -> tuple[Pixels, ...]:
        """Return something for each image once the gate is open."""
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fault is not None:
            raise self.fault
        return tuple(Pixels(part.image or b"", b"") for _, part in chat_images(chat))


@dataclass(slots=True)
class Stream:
    """One stream that reads its images and stays until it is let go."""

    showings: Showings
    name: str
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    seen: tuple[Pixels, ...] | None = None

    async def run(self, chat: Chat, sight: Sight) -> None:
        """Read, and stay."""
        with self.showings.open(self.name):
            self.seen = await self.showings.read(self.name, chat, sight)
            await self.leave.wait()


def streams_of(room: Any, count: int) -> list[Stream]:
    """Return streams of one worker."""
    showings = Showings(room)
    return [Stream(showings, str(number)) for number in range(count)]


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_choices_share_one_decoding(sight: Sight) -> None:
    """One reading and one room for all, until the last has left; who comes while one is there has
    the pixels at once, and who comes later has them decoded again."""
    room = Scripted()
    streams = streams_of(room, 5)
    chat = chat_of(b"a", b"b")
    tasks = [asyncio.create_task(each.run(chat, sight)) for each in streams[:3]]
    await settle()
    assert (room.begun, room.held) == (1, 2)
    room.gate.set()
    await settle()
    assert streams[0].seen is not None
    assert all(each.seen is streams[0].seen for each in streams[:3])
    streams[0].leave.set()
    tasks.append(asyncio.create_task(streams[3].run(chat_of(b"a", b"b"), sight)))
    await settle()
    assert streams[3].seen is streams[0].seen
    for each in streams[1:4]:
        assert (room.begun, room.held) == (1, 2)
        each.leave.set()
        await settle()
    assert room.held == 0
    await asyncio.gather(*tasks)
    streams[4].leave.set()
    await streams[4].run(chat, sight)
    assert (room.begun, room.held) == (2, 0)


@pytest.mark.asyncio
async def test_only_what_is_equal_is_shared(sight: Sight) -> None:
    """Other files, another order, another place, another type, another sight: each its own."""
    room = Scripted()
    room.gate.set()
    typed = ContentPart(image=b"a", media_type="image/png")
    chats = [
        chat_of(b"a"),
        chat_of(b"a", b""),
        chat_of(b"ab"),
        chat_of(b"a", before=1),
        Chat((ChatMessage("user", parts=(typed, ContentPart("what?"))),)),
    ]
    keys = {key_of(tuple(chat_images(chat)), sight) for chat in chats}
    other = Sight(sight.sizes, replace(sight.settings, resample=0))
    keys.add(key_of(tuple(chat_images(chats[0])), other))
    assert len(keys) == len(chats) + 1
    streams = streams_of(room, len(chats))
    tasks = [
        asyncio.create_task(each.run(chat, sight))
        for each, chat in zip(streams, chats, strict=True)
    ]
    await settle()
    assert room.begun == len(chats)
    for each in streams:
        each.leave.set()
    await asyncio.gather(*tasks)
    assert await streams[0].showings.read("none", Chat((ChatMessage("user", "a"),)), sight) == ()


@pytest.mark.asyncio
async def test_who_leaves_ends_it_for_nobody_else(sight: Sight) -> None:
    """The first of two leaves: the second has its pixels; both leave: it is ended, and its room is
    given back when it is over."""
    room = Scripted()
    first, second, third = streams_of(room, 3)
    chat = chat_of(b"a")
    tasks = [asyncio.create_task(each.run(chat, sight)) for each in (first, second)]
    await settle()
    tasks[0].cancel()
    await settle()
    assert (room.cancelled, room.held) == (0, 1)
    room.gate.set()
    await settle()
    assert second.seen is not None
    second.leave.set()
    await settle()
    assert room.held == 0
    room.gate.clear()
    task = asyncio.create_task(third.run(chat, sight))
    await settle()
    assert room.held == 1
    task.cancel()
    await settle()
    assert (room.begun, room.cancelled, room.held) == (2, 1, 0)


@pytest.mark.asyncio
async def test_what_failed_is_not_for_later_ones(sight: Sight) -> None:
    """Whoever waited has the error; the next one has the images decoded again, though one of them
    is still there. Where there is no room nothing is begun."""
    room = Scripted(fault=InvalidRequest.of("chat.messages[0].parts[0].image", "is none"))
    streams = streams_of(room, 4)
    chat = chat_of(b"a")
    with streams[0].showings.open("0"):
        tasks = [asyncio.create_task(each.run(chat, sight)) for each in streams[1:3]]
        reading = asyncio.create_task(streams[0].showings.read("0", chat, sight))
        await settle()
        room.gate.set()
        outcomes = await asyncio.gather(*tasks, reading, return_exceptions=True)
        assert all(outcome is room.fault for outcome in outcomes)
        assert (room.begun, room.held) == (1, 1)
        room.fault = None
        streams[3].leave.set()
        await streams[3].run(chat, sight)
        assert room.begun == 2
    assert room.held == 0
    room.held_max = 0
    with pytest.raises(QueueFull):
        await streams[3].run(chat, sight)
    assert room.begun == 2


class Counting(ImageRoom):
    """A room that counts what it is asked to read."""

    reads = 0

    async def read(self, chat: Chat, sight: Sight) -> tuple[Pixels, ...]:
        """Count, and read."""
        self.reads += 1
        return await super().read(chat, sight)


@pytest.mark.asyncio
async def test_a_real_room_decodes_once(sight: Sight) -> None:
    """Three streams over one picture: it is read once, and all have the same pixels."""
    room = Counting(limit_s=LONG_S, all_limit_s=LONG_S)
    streams = streams_of(room, 3)
    chat = chat_of(encode_image(picture(1)))
    tasks = [asyncio.create_task(each.run(chat, sight)) for each in streams]
    for each in streams:
        each.leave.set()
    await asyncio.gather(*tasks)
    assert room.reads == 1
    assert len({each.seen for each in streams}) == 1
    assert room.held_nbytes == 0
    await room.close()
