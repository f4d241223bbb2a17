"""The end of a worker process, owned or not: seen by every waiter, brought about once.

Invariants:
- Every waiter waits for the same end, and none that is cancelled takes it from the others.
- Closing runs once, however often and by however many it is asked for, and is not undone by the
  cancellation of a caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

END_UNKNOWN = 255
"""The exit code of a worker whose end was not ours to see."""


class Ending:
    """One process's end. One owner: the event loop."""

    def __init__(
        self, ended: asyncio.Future[int], close: Callable[[], Coroutine[Any, Any, int]]
    ) -> None:
        """Tell of `ended`, whose result is the exit code; `close` brings it about."""
        self._ended = ended
        self._close = close
        self._closing: asyncio.Task[int] | None = None

    @property
    def code(self) -> int | None:
        """The exit code; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        return await asyncio.shield(self._ended)

    async def comes_within(self, limit_s: float) -> bool:
        """Wait for the end, `limit_s` at most; return whether it has come."""
        await asyncio.wait({self._ended}, timeout=limit_s)
        return self._ended.done()

    async def close(self) -> int:
        """Have it closed, once for all who call, and return the exit code."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return await asyncio.shield(self._closing)
