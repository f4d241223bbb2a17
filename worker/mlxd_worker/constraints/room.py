"""Where streams wait for their response formats to be compiled, off the event loop.

Invariants:
- At most CONSTRAINT_COMPILES_MAX formats are compiled at once, and at most
  CONSTRAINT_COMPILES_WAITING_MAX more wait. A format that several streams ask for at a time is
  compiled once.
- No stream waits longer than CONSTRAINT_WAIT_S. What takes longer goes on, in its own place, until
  its trial ends it; then its result is kept like any other.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull, ShuttingDown
from mlxd_worker.constraints.compiler import TRIAL, Constraints, Wanted, field_of
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.killable.pool import Pool

_Wanted = tuple[Constraints, Wanted]


class CompileRoom:
    """One worker's compilations. One owner: the event loop."""

    def __init__(
        self,
        *,
        compiles_max: int = config.CONSTRAINT_COMPILES_MAX,
        waiting_max: int = config.CONSTRAINT_COMPILES_WAITING_MAX,
        wait_s: float = config.CONSTRAINT_WAIT_S,
        trials: Pool | None = None,
    ) -> None:
        """Compile nothing yet."""
        self._trials = trials or Pool(TRIAL)
        self._turns = asyncio.Semaphore(compiles_max)
        # Of their own: the event loop's are few, and whoever has other work there would wait.
        self._threads = ThreadPoolExecutor(compiles_max, "compile")
        self._tasks_max = compiles_max + waiting_max
        self._waiting_max = waiting_max
        self._wait_s = wait_s
        self._tasks: dict[_Wanted, asyncio.Task[Constraint]] = {}
        self._closed = False

    async def compile(self, constraints: Constraints, wanted: Wanted) -> Constraint:
        """Return a format compiled for a model; at once where it is kept.

        Raises:
            InvalidRequest: it makes no sense, is not served, or takes too long to compile.
            QueueFull: too many wait.
            ShuttingDown: the room is closed.
        """
        constraint = constraints.find_kept(wanted)
        if constraint is not None:
            return constraint
        task = self._tasks.get((constraints, wanted)) or self._begin(constraints, wanted)
        done, _ = await asyncio.wait({task}, timeout=self._wait_s)
        if not done:
            problem = f"not compiled within {self._wait_s:g} s"
            raise InvalidRequest.of(field_of(wanted), problem)
        return task.result()

    async def close(self) -> None:
        """End the processes that try grammars out; nothing is compiled any more."""
        self._closed = True
        await asyncio.to_thread(self._trials.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, constraints: Constraints, wanted: Wanted) -> asyncio.Task[Constraint]:
        if len(self._tasks) >= self._tasks_max:
            raise QueueFull("response formats to compile", self._waiting_max)
        key = (constraints, wanted)
        task = self._tasks[key] = asyncio.create_task(self._compile(constraints, wanted))
        task.add_done_callback(lambda done: self._forget(key, done))
        return task

    async def _compile(self, constraints: Constraints, wanted: Wanted) -> Constraint:
        async with self._turns:
            if self._closed:
                raise ShuttingDown
            loop = asyncio.get_running_loop()
            work = partial(constraints.compile, wanted, self._trials)
            return await loop.run_in_executor(self._threads, copy_context().run, work)

    def _forget(self, key: _Wanted, task: asyncio.Task[Constraint]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it as lost
