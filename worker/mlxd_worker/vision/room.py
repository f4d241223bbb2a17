"""Where streams wait for their images to be decoded, off the event loop and out of the process.

Invariants:
- This process parses no image: it sends a file's bytes to a child, and takes pixels of a size that
  it knows before. The images of at most IMAGE_READS_MAX requests are decoded at once, and at most
  IMAGE_READS_WAITING_MAX more wait.
- An image is done after IMAGE_READ_S: its child is killed then, and replaced when needed. Whatever
  a file does to its child is the error of that file's field.
- Pixels are counted before an image is decoded and until its stream ends: at most
  IMAGE_PIXELS_HELD_BYTES_MAX are held by all streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from mlxd_shared import config
from mlxd_shared.domain.chats import Chat, ContentPart, chat_images
from mlxd_shared.domain.errors import InvalidRequest, QueueFull, ShuttingDown
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Closed, Died, Late
from mlxd_worker.tokenizing.turns import Turns
from mlxd_worker.vision.asking import BAD, COMMAND, GOOD, NAME_NBYTES, question_of
from mlxd_worker.vision.sight import Sight


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as a model sees it."""

    name: bytes
    """Of no other image."""
    colours: bytes
    """Rows of pixels, 8 bits for each of three colours."""


class ImageRoom:
    """One worker's decoding of images. One owner: the event loop."""

    def __init__(
        self,
        *,
        reads_max: int = config.IMAGE_READS_MAX,
        waiting_max: int = config.IMAGE_READS_WAITING_MAX,
        limit_s: float = config.IMAGE_READ_S,
        held_nbytes_max: int = config.IMAGE_PIXELS_HELD_BYTES_MAX,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """Start no process yet."""
        self.held_nbytes = 0
        """The pixels of streams that run or wait."""
        self._held_nbytes_max = held_nbytes_max
        self._children = Pool(command)
        self._turns = Turns(
            "images to decode", turns_max=reads_max, waiting_max=waiting_max, waiting_nbytes_max=0
        )
        self._threads = ThreadPoolExecutor(reads_max, "images")
        self._limit_s = limit_s
        self._closed = False

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
        await self._turns.acquire("images", 0)
        # It keeps its turn to its end, even if abandoned: a thread cannot be stopped.
        task = asyncio.create_task(self._read_on_thread(images, sight))
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the children; decode no more."""
        self._closed = True
        await asyncio.to_thread(self._children.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _over(self, task: asyncio.Task[tuple[Pixels, ...]]) -> None:
        self._turns.release()
        if not task.cancelled():
            task.exception()  # a waiter has it; without one there is nothing to warn of

    async def _read_on_thread(
        self, images: tuple[tuple[str, ContentPart], ...], sight: Sight
    ) -> tuple[Pixels, ...]:
        if self._closed:
            raise ShuttingDown
        loop = asyncio.get_running_loop()
        work = partial(self._read_all, images, sight)
        return await loop.run_in_executor(self._threads, copy_context().run, work)

    def _read_all(
        self, images: tuple[tuple[str, ContentPart], ...], sight: Sight
    ) -> tuple[Pixels, ...]:
        return tuple([self._read_one(field, part, sight) for field, part in images])

    def _read_one(self, field: str, part: ContentPart, sight: Sight) -> Pixels:
        question = question_of(part.image or b"", media_type=part.media_type, target=sight.target)
        try:
            answer = self._children.ask(question, limit_s=self._limit_s)
        except Late:
            problem = f"takes longer than {self._limit_s:g} s to decode"
            raise InvalidRequest.of(field, problem) from None
        except Died:
            problem = "takes more memory to decode than there is for it"
            raise InvalidRequest.of(field, problem) from None
        except Closed:
            raise ShuttingDown from None
        if answer.startswith(BAD):
            problem = answer[len(BAD) :].decode(errors="replace")
            raise InvalidRequest.of(field, problem[: config.CHAT_PROBLEM_CHARS_MAX])
        named = answer[len(GOOD) :]
        name, colours = named[:NAME_NBYTES], named[NAME_NBYTES:]
        if len(colours) != sight.sizes.pixels_nbytes:
            raise InvalidRequest.of(field, "its decoder answered nonsense")
        # With the pixels themselves, so that a file that took its decoder over names none but them.
        return Pixels(blake2b(name + colours, digest_size=NAME_NBYTES).digest(), colours)
