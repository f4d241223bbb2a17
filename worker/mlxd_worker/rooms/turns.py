"""Who is next where few are served at once: kinds of calls in turn, and each in the order it came.

Invariants:
- At most `turns_max` hold a turn. Nobody who waits is passed by a later one of the same kind, and
  by at most one of each other kind for each turn that ends.
- At most `waiting_max` wait, who hold at most `waiting_nbytes_max` together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from mlxd_shared.domain.errors import QueueFull


@dataclass(eq=False, slots=True)
class _Waiter:
    """Somebody who waits, and what it holds meanwhile."""

    nbytes: int
    called: asyncio.Future[None]


class Turns:
    """One owner: the event loop."""

    def __init__(
        self, name: str, *, turns_max: int, waiting_max: int, waiting_nbytes_max: int
    ) -> None:
        """Start empty; `name` is the queue's name in errors."""
        self._name = name
        self._free = turns_max
        self._waiting_max = waiting_max
        self._waiting_nbytes_max = waiting_nbytes_max
        self._queues: dict[str, deque[_Waiter]] = {}
        """By kind, in the order in which kinds are served next; none is empty."""

    @property
    def are_idle(self) -> bool:
        """Whether the queue is empty."""
        return not self._queues

    async def acquire(self, kind: str, nbytes: int) -> None:
        """Wait for a turn, given back by `release`; raises QueueFull if too many wait."""
        if self._free > 0:
            self._free -= 1
            return
        waiting = [waiter for queue in self._queues.values() for waiter in queue]
        if len(waiting) >= self._waiting_max:
            raise QueueFull(self._name, self._waiting_max)
        if sum(waiter.nbytes for waiter in waiting) + nbytes > self._waiting_nbytes_max:
            raise QueueFull(f"bytes of {self._name}", self._waiting_nbytes_max)
        waiter = _Waiter(nbytes, asyncio.get_running_loop().create_future())
        self._queues.setdefault(kind, deque()).append(waiter)
        try:
            await waiter.called
        except asyncio.CancelledError:
            if waiter.called.done() and not waiter.called.cancelled():
                self.release()  # it was called, and left at the same moment
            else:
                self._leave(kind, waiter)
            raise

    def release(self) -> None:
        """Give a turn to the next waiter, or keep it for a later one."""
        while self._queues:
            kind = next(iter(self._queues))
            queue = self._queues.pop(kind)
            waiter = queue.popleft()
            if queue:
                self._queues[kind] = queue  # behind the other kinds
            if not waiter.called.done():  # else it is leaving, and its task has not run yet
                waiter.called.set_result(None)
                return
        self._free += 1

    def _leave(self, kind: str, waiter: _Waiter) -> None:
        queue = self._queues.get(kind, deque())
        if waiter not in queue:
            return  # a turn that ended meanwhile has passed it by
        queue.remove(waiter)
        if not queue:
            del self._queues[kind]
