"""The calls under way at one engine, which another call may abort by their ids.

Invariants:
- An aborted stream has given back its lease, and so its row, before its reader hears of the end.
- Aborting is idempotent; an id that nobody knows is passed over, for it may have ended meanwhile.
- No stream outlives its reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc

from mlxd_shared.wire.status import RemoteError

_T = TypeVar("_T")


class _Call:
    """One call. It is aborted once its work has begun, or never begins."""

    def __init__(self) -> None:
        self.aborted = False
        self.work: asyncio.Task[Any] | None = None
        """The task that may be cancelled."""

    def abort(self) -> None:
        """End it."""
        self.aborted = True
        if self.work is not None:
            self.work.cancel()


class Calls:
    """Those of one engine. One owner: the event loop's thread."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[_Call]] = {}
        self.active = 0
        """How many are under way, nameless ones too."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """End the calls of these ids."""
        for request_id in request_ids:
            for call in self._by_id.get(request_id, ()):
                call.abort()

    async def read(
        self, request_id: str, frames: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes | None, None]:
        """Yield a stream's messages; None, and nothing after it, if it was aborted.

        Raises:
            Exception: what the stream raised.
        """
        arrived: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(1)
        with self._register(request_id) as call:
            reading = asyncio.create_task(_pass_on(call, frames, arrived))
            try:
                while (item := await arrived.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield item
                if call.aborted:
                    yield None
            finally:
                if not call.aborted:
                    reading.cancel()
                while not arrived.empty():  # it may wait to say that it was aborted
                    arrived.get_nowait()
                await asyncio.gather(reading, return_exceptions=True)

    async def ask(self, request_id: str, question: Coroutine[Any, Any, _T]) -> _T:
        """Return the answer to a question.

        Raises:
            RemoteError: it was aborted (CANCELLED).
            Exception: what the question raised.
        """
        with self._register(request_id) as call:
            call.work = work = asyncio.create_task(question)
            try:
                return await work
            except asyncio.CancelledError:
                if not call.aborted:
                    raise
                raise RemoteError(grpc.StatusCode.CANCELLED, "the request was aborted") from None

    @contextmanager
    def _register(self, request_id: str) -> Iterator[_Call]:
        """Count a call, and find it by its id, if it has one, while the body runs."""
        call, self.active = _Call(), self.active + 1
        if request_id:
            self._by_id.setdefault(request_id, []).append(call)
        try:
            yield call
        finally:
            self.active -= 1
            if request_id:
                self._by_id[request_id].remove(call)
                if not self._by_id[request_id]:
                    del self._by_id[request_id]


async def _pass_on(
    call: _Call,
    frames: AsyncGenerator[bytes, None],
    arrived: asyncio.Queue[bytes | Exception | None],
) -> None:
    """Put a stream's messages into a queue, then None, or the error that it failed with."""
    end: Exception | None = None
    try:
        async with aclosing(frames):
            if not call.aborted:
                call.work = asyncio.current_task()
                async for frame in frames:
                    await arrived.put(frame)
    except asyncio.CancelledError:
        if not call.aborted:  # the reader has gone
            raise
    except Exception as error:  # noqa: BLE001 - the reader raises it
        end = error
    call.work = None  # a later abort must not keep the reader from hearing of this end
    await arrived.put(end)
    del end  # its traceback knows this frame
