"""An event loop whose own threads, where `asyncio.to_thread` works, are all at work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

LIMIT_S = 60.0


@asynccontextmanager
async def busy_threads() -> AsyncIterator[None]:
    """Let nothing that goes to the event loop's own threads begin before the body ends.

    The body fails where it waits for such a thing. The loop is to be one test's own.
    """
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    go = threading.Event()
    held = loop.run_in_executor(None, go.wait)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield
    finally:
        go.set()
        await held
