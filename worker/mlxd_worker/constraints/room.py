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

from mlxd_shared import config
from mlxd_shared.errors import InvalidRequest, QueueFull
from mlxd_shared.formats import ResponseFormat
from mlxd_worker.constraints.compiler import Constraints, field_of
from mlxd_worker.constraints.trials import Trials
from mlxd_worker.engine.constraint import Constraint

_Wanted = tuple[Constraints, ResponseFormat]


class CompileRoom:
    """One worker's compilations. One owner: the event loop."""

    def __init__(
        self,
        *,
        compiles_max: int = config.CONSTRAINT_COMPILES_MAX,
        waiting_max: int = config.CONSTRAINT_COMPILES_WAITING_MAX,
        wait_s: float = config.CONSTRAINT_WAIT_S,
        trials: Trials | None = None,
    ) -> None:
        """Compile nothing yet."""
        self._trials = trials or Trials()
        self._turns = asyncio.Semaphore(compiles_max)
        self._tasks_max = compiles_max + waiting_max
        self._waiting_max = waiting_max
        self._wait_s = wait_s
        self._tasks: dict[_Wanted, asyncio.Task[Constraint]] = {}

    async def compiled(self, constraints: Constraints, wanted: ResponseFormat) -> Constraint:
        """Return a format compiled for a model; at once where it is kept.

        Raises:
            InvalidRequest: it makes no sense, is not served, or takes too long to compile.
            QueueFull: too many wait.
        """
        found = constraints.kept(wanted)
        if found is not None:
            return found
        task = self._tasks.get((constraints, wanted)) or self._begin(constraints, wanted)
        done, _ = await asyncio.wait({task}, timeout=self._wait_s)
        if not done:
            problem = f"not compiled within {self._wait_s:g} s"
            raise InvalidRequest.of(field_of(wanted.kind), problem)
        return task.result()

    def close(self) -> None:
        """End the processes that try grammars out; nothing is compiled any more."""
        self._trials.close()

    def _begin(self, constraints: Constraints, wanted: ResponseFormat) -> asyncio.Task[Constraint]:
        if len(self._tasks) >= self._tasks_max:
            raise QueueFull("response formats to compile", self._waiting_max)
        key = (constraints, wanted)
        task = self._tasks[key] = asyncio.create_task(self._compile(constraints, wanted))
        task.add_done_callback(lambda done: self._forget(key, done))
        return task

    async def _compile(self, constraints: Constraints, wanted: ResponseFormat) -> Constraint:
        async with self._turns:
            return await asyncio.to_thread(constraints.compile, wanted, self._trials)

    def _forget(self, key: _Wanted, task: asyncio.Task[Constraint]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # whoever waits has it; where nobody does, nobody is to be warned
