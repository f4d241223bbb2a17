"""An event loop's threads that ask children: in turns, to their end, and no longer than needed.

Invariants:
- Work on a thread keeps its turn to its end, even if nobody waits for it any more: a thread cannot
  be stopped. Its child can: whoever leaves ends that, and the thread with it.
- Children that have been asked nothing for a while end, where a time for that is given.
- The threads are the askers' own, one for each turn: work never waits behind unrelated work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from mlxd_shared.domain.errors import ShuttingDown
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Stop
from mlxd_worker.rooms.turns import Turns

_T = TypeVar("_T")


async def to_its_end(begin: Callable[[], asyncio.Future[_T]], over: Callable[[], None]) -> _T:
    """Return the result of what is begun on a thread; call `over` at its end, even if nobody waits.

    It is over at once where it cannot be begun.
    """
    try:
        begun = begin()
    except BaseException:
        over()
        raise

    def end(done: asyncio.Future[_T]) -> None:
        over()
        if not done.cancelled():
            done.exception()  # retrieved, so that asyncio does not report it as lost

    begun.add_done_callback(end)
    return await asyncio.shield(begun)


class Askers:
    """Those of one pool, which they close. One owner: the event loop."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        *,
        turns_max: int,
        waiting_max: int,
        idle_s: float | None = None,
    ) -> None:
        """Start no thread yet.

        name: of what waits for a turn, in errors.
        idle_s: how long children wait for the next question; None: as long as the worker lives.
        """
        self._pool = pool
        self._turns = Turns(
            name, turns_max=turns_max, waiting_max=waiting_max, waiting_nbytes_max=0
        )
        self._threads = ThreadPoolExecutor(turns_max, name)
        self._idle_s = idle_s
        self._resting: asyncio.TimerHandle | None = None
        self._closed = False

    async def do(
        self, kind: str, work: Callable[[Stop], _T], over: Callable[[], None] = lambda: None
    ) -> _T:
        """Return the result of work, which asks the pool with the `Stop` that it is given.

        kind: the kind of call, by which turns are shared.
        over: called once, when the work is over or will not begin; maybe after its waiter left.

        Raises:
            QueueFull: too many wait.
            ShuttingDown: the askers are closed.
            Exception: whatever the work raises.
        """
        try:
            await self._turns.acquire(kind, 0)
        except BaseException:
            over()
            raise

        def end() -> None:
            self._turns.release()
            self._rest_later(self._idle_s)
            over()

        if self._closed:
            end()
            raise ShuttingDown
        self._rest_later(None)
        stop = Stop()
        run = partial(copy_context().run, work, stop)
        begin = partial(asyncio.get_running_loop().run_in_executor, self._threads, run)
        try:
            return await to_its_end(begin, end)
        except asyncio.CancelledError:
            stop.set()
            raise

    async def close(self) -> None:
        """End the children; ask no more."""
        self._closed = True
        self._rest_later(None)
        await asyncio.to_thread(self._pool.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _rest_later(self, delay_s: float | None) -> None:
        """End idle children after a while; None: cancel that."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if delay_s is not None and not self._closed:
            loop = asyncio.get_running_loop()
            rest = partial(loop.run_in_executor, self._threads, self._pool.rest)
            self._resting = loop.call_later(delay_s, rest)
