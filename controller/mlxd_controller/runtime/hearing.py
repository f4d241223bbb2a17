"""Waits with a limit that counts only time in which this process could receive an answer.

Time in which the process or the machine was suspended, or the clock jumped, counts against nobody:
whatever arrived meanwhile is read before anyone is judged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

SLICE_S = 1.0
"""A wait is cut into slices of this length; a slice with a suspension in it does not count."""
LATE_S = 1.0
"""A slice that overran by more than this contained a suspension."""
_T = TypeVar("_T")


async def hear(answer: Awaitable[_T], *, limit_s: float) -> _T:
    """Return the awaited result; if it does not arrive in time, it is cancelled.

    Raises:
        TimeoutError: nothing came for `limit_s`.
    """
    waiting = asyncio.ensure_future(answer)
    try:
        if not await wait_for_answer({waiting}, limit_s=limit_s):
            raise TimeoutError
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})
        if not waiting.cancelled():
            waiting.exception()  # retrieved, so that asyncio does not report it as lost
    return waiting.result()


async def wait_for_answer(answers: Collection[asyncio.Future[Any]], *, limit_s: float) -> bool:
    """Wait until one of `answers` is done; return whether one is.

    limit_s: how long to wait; math.inf waits for ever. Cancels none of them.
    """
    clock = asyncio.get_running_loop().time
    left_s = limit_s
    while not any(answer.done() for answer in answers):
        if left_s <= 0:
            return False
        slice_s = min(left_s, SLICE_S)
        began_s = clock()
        timeout_s = None if math.isinf(left_s) else slice_s
        await asyncio.wait(answers, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if clock() - began_s <= slice_s + LATE_S:
            left_s -= slice_s
    return True
