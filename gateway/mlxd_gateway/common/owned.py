"""Streams that an answer owns: read one by one, and closed however the answer ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")


class OwningResponse(StreamingResponse):
    """Streams chunks that no proxy is to keep, and closes what they are made of."""

    def __init__(
        self, chunks: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], *, media_type: str
    ) -> None:
        """Send `chunks`; `close` is awaited at the end, also if the client goes."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(chunks, headers=headers, media_type=media_type)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, unless the client goes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()


async def next_of(items: AsyncIterator[_T]) -> _T | None:
    """Return the next item; None: there is none."""
    async for item in items:
        return item
    return None
