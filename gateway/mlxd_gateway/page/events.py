"""Events for the page: begun before the answer is, so that a refusal has a status of its own.

Invariants:
- An answer owns the stream that it was given and ends it, however it ends itself.
- What is silent for HTTP_PING_S says that it is alive.
- At most PAGE_STREAMS_MAX of these answers are under way at once, PAGE_STREAMS_A_KEY_MAX with one
  key, and none holds up a gateway that is leaving.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mlxd import MlxdError
from mlxd_gateway.common.failures import Failure, FailureKind, Refused, failure_of
from mlxd_gateway.common.owned import OwningResponse, next_of
from mlxd_gateway.common.responses import EVENT_STREAM, while_there, write_comment, write_event
from mlxd_gateway.page.errors import error_body, rename
from mlxd_shared import config

_T = TypeVar("_T")


class StreamCount:
    """How many answers stream to pages at once, in all and to whom a key belongs."""

    def __init__(
        self, most: int = config.PAGE_STREAMS_MAX, most_a_key: int = config.PAGE_STREAMS_A_KEY_MAX
    ) -> None:
        self._most = most
        self._most_a_key = most_a_key
        self._by_owner: Counter[str] = Counter()

    @contextmanager
    def hold(self, owner: str) -> Iterator[None]:
        """Count one more around the body. owner: what tells keys apart; empty where there are none.

        Raises:
            Refused: there are as many as there may be, of all or of this key.
        """
        if self._by_owner.total() >= self._most:
            raise _refuse(f"{self._most} streams to pages are open")
        if owner and self._by_owner[owner] >= self._most_a_key:
            raise _refuse(f"{self._most_a_key} streams to pages are open with this key")
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]


def _refuse(message: str) -> Refused:
    return Refused(Failure(FailureKind.BUSY, message, retry_after_s=config.HTTP_RETRY_S))


async def stream_events(
    request: Request,
    held: AsyncExitStack,
    items: AsyncIterator[_T],
    write: Callable[[_T], bytes],
) -> Response:
    """Return the answer that sends `items` as events; `held` is closed with it.

    Raises:
        Refused: what makes the items failed before there was one.
        ClientDisconnect: the client has gone.
    """
    try:
        first = await answer_once(request, next_of(items))
    except BaseException:
        await held.aclose()
        raise
    leaving: asyncio.Event = request.app.state.leaving
    chunks = _write(first, items, write, leaving)
    return OwningResponse(chunks, held.aclose, media_type=EVENT_STREAM)


async def answer_once(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` returns; it is cancelled if the client goes.

    Raises:
        Refused: it failed.
        ClientDisconnect: the client has gone.
    """
    try:
        return await while_there(request, work)
    except MlxdError as error:
        raise Refused(failure_of(error, rename)) from error


async def _write(
    first: _T | None,
    items: AsyncIterator[_T],
    write: Callable[[_T], bytes],
    leaving: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Yield events, comments where there are none for a while, and how it ended.

    A stream that ends without an event that says so has broken off.
    """
    item = first
    left = asyncio.create_task(leaving.wait())
    try:
        while item is not None:
            yield write(item)
            upcoming = asyncio.create_task(next_of(items))
            try:
                while not upcoming.done():
                    await asyncio.wait(
                        {upcoming, left},
                        timeout=config.HTTP_PING_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if left.done():
                        return
                    if not upcoming.done():
                        yield write_comment("waiting")
                item = upcoming.result()
            finally:
                upcoming.cancel()
                await asyncio.wait({upcoming})
        yield write_event({}, "end")
    except MlxdError as error:
        yield write_event(error_body(failure_of(error, rename)), "error")
    finally:
        left.cancel()
