"""Equal images of streams that are there together, decoded once: choices of one request, above all.

Invariants:
- Streams share what has the same files, at the same fields, for the same sight: an error names the
  right field for each of them. Their pixels are there once, and counted once, until the last of
  them has left.
- A stream that leaves ends the decoding only if nobody else waits for it.
- What failed is shared by those who waited for it, and by nobody who comes later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from mlxd_shared.domain.chats import Chat, ContentPart, chat_images
from mlxd_shared.wire.intake import run_paced
from mlxd_worker.vision.room import ImageRoom, Pixels
from mlxd_worker.vision.sight import Sight

Images = tuple[tuple[str, ContentPart], ...]
"""A request's images, each behind its field."""


@dataclass(slots=True)
class _Showing:
    """Images of streams that are there."""

    key: bytes
    reading: asyncio.Task[tuple[Pixels, ...]]
    room: ExitStack
    """The room that their pixels have."""
    streams: set[str] = field(default_factory=set)
    """Request ids."""


class Showings:
    """Those of one worker. One owner: the event loop."""

    def __init__(self, room: ImageRoom) -> None:
        """Have images decoded in `room`."""
        self._room = room
        self._by_key: dict[bytes, _Showing] = {}
        self._by_stream: dict[str, _Showing] = {}

    @contextmanager
    def open(self, request_id: str) -> Iterator[None]:
        """Let a stream read its images within the block, and keep their pixels to its end."""
        try:
            yield
        finally:
            self._leave(request_id)

    async def read(self, request_id: str, chat: Chat, sight: Sight) -> tuple[Pixels, ...]:
        """Return a conversation's images, in order; once for a stream, within its `open`.

        Raises:
            InvalidRequest: one is none that is read, or beyond a bound; names its field.
            QueueFull: too many requests wait, or other streams' pixels leave no room.
            ShuttingDown: the room is closed.
        """
        images = tuple(chat_images(chat))
        if not images:
            return ()
        key = await run_paced(key_of, images, sight)
        showing = self._by_key.get(key) or self._begin(key, images, chat, sight)
        showing.streams.add(request_id)
        self._by_stream[request_id] = showing
        return await asyncio.shield(showing.reading)

    def _begin(self, key: bytes, images: Images, chat: Chat, sight: Sight) -> _Showing:
        with ExitStack() as stack:
            stack.enter_context(self._room.hold(len(images), sight))
            reading = asyncio.create_task(self._room.read(chat, sight))
            showing = self._by_key[key] = _Showing(key, reading, stack.pop_all())
        reading.add_done_callback(lambda _: self._end(showing))
        return showing

    def _end(self, showing: _Showing) -> None:
        """Note that the decoding is over: what failed is not for later ones."""
        reading = showing.reading
        if reading.cancelled() or reading.exception() is not None:
            self._forget(showing)
        if not showing.streams:
            showing.room.close()

    def _leave(self, request_id: str) -> None:
        showing = self._by_stream.pop(request_id, None)
        if showing is None:
            return
        showing.streams.discard(request_id)
        if showing.streams:
            return
        self._forget(showing)
        if showing.reading.done():
            showing.room.close()
        else:
            showing.reading.cancel()  # its room is given back when it is over

    def _forget(self, showing: _Showing) -> None:
        if self._by_key.get(showing.key) is showing:
            del self._by_key[showing.key]


def key_of(images: Images, sight: Sight) -> bytes:
    """Return a name that only equal images at equal fields have, as one model sees them."""
    digest = blake2b(repr(sight.target).encode(), digest_size=32)
    for place, part in images:
        content = part.image or b""
        digest.update(f"\n{place} {part.media_type!r} {len(content)}\n".encode())
        digest.update(content)
    return digest.digest()
