"""Where streams wait for their images to be decoded, off the event loop and out of the process.

Invariants:
- This process parses no image: it sends a file's bytes to a child, and takes pixels of a size that
  it knows before, or of rows and columns that come with them, up to a size that it knows. The
  images of at most IMAGE_READS_MAX requests are decoded at once, and at most
  IMAGE_READS_WAITING_MAX more wait.
- An image is done after IMAGE_READ_S, a request's images after IMAGES_READ_S, and all of them when
  their stream leaves: the child is killed then, and replaced when needed. Whatever a file does to
  its child is the error of that file's field.
- Pixels are counted before an image is decoded and until its stream ends, and so does its decoding:
  at most IMAGE_PIXELS_HELD_BYTES_MAX are held by all streams.
- They are there once, in what the child has answered: what is passed on is a view of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from mlxd_shared import config
from mlxd_shared.domain.chats import Chat, ContentPart, chat_images
from mlxd_shared.domain.errors import InvalidRequest, QueueFull, ShuttingDown
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Closed, Died, Late, Stop
from mlxd_worker.rooms.askers import Askers
from mlxd_worker.vision.asking import (
    BAD,
    COMMAND,
    GOOD,
    NAME_NBYTES,
    Bytes,
    grid_of,
    question_of,
)
from mlxd_worker.vision.sight import Sight


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as a model sees it."""

    name: bytes
    """Of no other image."""
    colours: Bytes
    """Rows of pixels, 8 bits for each of three colours."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its places, where it keeps its shape."""


@dataclass(slots=True)
class _Reading:
    """The decoding of a request's images."""

    is_over: bool = False
    left_nbytes: int = 0
    """The pixels of a stream that left before it was over."""


_Images = tuple[tuple[str, ContentPart], ...]
"""A request's images, each behind its field."""


class ImageRoom:
    """One worker's decoding of images. One owner: the event loop."""

    def __init__(
        self,
        *,
        waiting_max: int = config.IMAGE_READS_WAITING_MAX,
        limit_s: float = config.IMAGE_READ_S,
        all_limit_s: float = config.IMAGES_READ_S,
        idle_s: float = config.IMAGE_CHILD_IDLE_S,
        held_nbytes_max: int = config.IMAGE_PIXELS_HELD_BYTES_MAX,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """Start no process yet.

        limit_s: the time for one image; all_limit_s: for all of a request's.
        """
        self.held_nbytes = 0
        """The pixels of streams that run or wait."""
        self._held_nbytes_max = held_nbytes_max
        self._children = Pool(command)
        self._askers = Askers(
            "images to decode",
            self._children,
            turns_max=config.IMAGE_READS_MAX,
            waiting_max=waiting_max,
            idle_s=idle_s,
        )
        self._limit_s = limit_s
        self._all_limit_s = all_limit_s

    @contextmanager
    def hold(self, images: int, sight: Sight | None) -> Iterator[None]:
        """Have room for the pixels of so many images, which a stream keeps to its end.

        Raises:
            QueueFull: other streams' leave none.
        """
        nbytes = 0 if sight is None else images * sight.sizes.pixels_nbytes
        if self.held_nbytes + nbytes > self._held_nbytes_max:
            raise QueueFull(
                "bytes of decoded images", self._held_nbytes_max, config.IMAGE_HELD_RETRY_S
            )
        self.held_nbytes += nbytes
        try:
            yield
        finally:
            self.held_nbytes -= nbytes

    async def read(self, chat: Chat, sight: Sight) -> tuple[Pixels, ...]:
        """Return a conversation's images, in order.

        Raises:
            InvalidRequest: one is none that is read, or beyond a bound; names its field.
            QueueFull: too many requests wait.
            ShuttingDown: the room is closed.
        """
        images = tuple(chat_images(chat))
        if not images:
            return ()
        reading = _Reading()
        over = partial(self._over, reading)
        try:
            return await self._askers.do("images", partial(self._read_all, images, sight), over)
        except asyncio.CancelledError:
            if not reading.is_over:
                reading.left_nbytes = len(images) * sight.sizes.pixels_nbytes
                self.held_nbytes += reading.left_nbytes
            raise

    async def close(self) -> None:
        """End the children; decode no more."""
        await self._askers.close()

    def _over(self, reading: _Reading) -> None:
        reading.is_over = True
        self.held_nbytes -= reading.left_nbytes

    def _read_all(self, images: _Images, sight: Sight, stop: Stop) -> tuple[Pixels, ...]:
        until_s = time.monotonic() + self._all_limit_s
        return tuple([self._read_one(*image, sight, until_s, stop) for image in images])

    def _read_one(
        self, field: str, part: ContentPart, sight: Sight, until_s: float, stop: Stop
    ) -> Pixels:
        question = question_of(part.image or b"", media_type=part.media_type, target=sight.target)
        left_s = until_s - time.monotonic()
        try:
            if left_s <= 0:
                raise Late  # noqa: TRY301 - as the child would be
            answer = self._children.ask(question, limit_s=min(self._limit_s, left_s), stop=stop)
        except Late:
            problem = f"takes longer than {self._limit_s:g} s to decode"
            if left_s < self._limit_s:
                problem = f"the request's images take longer than {self._all_limit_s:g} s to decode"
            raise InvalidRequest.of(field, problem) from None
        except Died:
            problem = "takes more memory to decode than there is for it"
            raise InvalidRequest.of(field, problem) from None
        except Closed:
            raise ShuttingDown from None
        if answer.startswith(BAD):
            problem = answer[len(BAD) :].decode(errors="replace")
            raise InvalidRequest.of(field, problem[: config.CHAT_PROBLEM_CHARS_MAX])
        named = memoryview(answer)[len(GOOD) :]
        digest = blake2b(named, digest_size=NAME_NBYTES)
        shown = named[NAME_NBYTES:]
        sizes = sight.sizes
        grid, colours = grid_of(shown) if sizes.varies else (None, shown)
        tokens = sizes.tokens if grid is None else grid[0] * grid[1]
        if not 1 <= tokens <= sizes.tokens or len(colours) != sizes.nbytes_of(tokens):
            raise InvalidRequest.of(field, "its decoder answered nonsense")
        # With the pixels themselves, so that a file that took its decoder over names none but them.
        return Pixels(digest.digest(), colours, grid)
