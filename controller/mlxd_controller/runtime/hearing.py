"""Waiting for others by time in which this process could hear them.

Time in which the process or the machine stood still (a stopped or suspended server, a jump of the
clock) counts against nobody: what came meanwhile is looked at before anyone is judged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

SLICE_S = 1.0
"""A wait is cut into pieces of this length; one that stood still is lost whole."""
LATE_S = 1.0
"""A piece that took so much longer than it should have is one in which nobody could hear."""
_T = TypeVar("_T")


async def hear(answer: Awaitable[_T], *, limit_s: float) -> _T:
    """Return what is waited for; cancelled and gone if it is not there in time.

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
            waiting.exception()  # read, also where nobody wants it any more
    return waiting.result()


async def wait_for_answer(answers: Collection[asyncio.Future[Any]], *, limit_s: float) -> bool:
    """Wait until one of `answers` is done, and return whether it is; see the invariants.

    limit_s: how long nobody may answer; math.inf waits for ever. Cancels none of them.
    """
    clock = asyncio.get_running_loop().time
    left_s = limit_s
    while not any(answer.done() for answer in answers):
        if left_s <= 0:
            return False
        piece_s = min(left_s, SLICE_S)
        began_s = clock()
        whole = None if math.isinf(left_s) else piece_s
        await asyncio.wait(answers, timeout=whole, return_when=asyncio.FIRST_COMPLETED)
        if clock() - began_s <= piece_s + LATE_S:
            left_s -= piece_s
    return True
