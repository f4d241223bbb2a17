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

from mlxd_controller.launcher.output import Output
from mlxd_controller.launcher.records import WorkerFiles
from mlxd_controller.runtime.ports import Holding
from mlxd_shared.wire.proof import Proof

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


class EndingProcess:
    """The part of ports.WorkerProcess that is alike for all: who it is, and its end."""

    def __init__(self, incarnation: str, ending: Ending) -> None:
        """Name the identity that it was given, or gave itself; `ending` is its end."""
        self.incarnation = incarnation
        self._ending = ending

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: a signal; END_UNKNOWN: not ours to see."""
        return self._ending.code

    async def wait_exited(self) -> int:
        """Return the exit code once it has ended, and is reaped where it is a child."""
        return await self._ending.wait()

    async def close(self) -> int:
        """End it, or give it back; see the invariants of its file."""
        return await self._ending.close()


class LocalProcess(EndingProcess):
    """A process on this machine that a controller of ours started: its files, its output."""

    def __init__(
        self, incarnation: str, ending: Ending, *, files: WorkerFiles, output: Output
    ) -> None:
        """Take over its files; `output` is followed by whoever reads it."""
        super().__init__(incarnation, ending)
        self.files = files
        self._output = output
        self._proof: Proof | None = None

    @property
    def proof(self) -> Proof | None:
        """What the process has told its controller, if it checks requests as this one does."""
        return self._proof

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of output that were read, oldest first."""
        return self._output.last_lines()

    def remember(self, holding: Holding | None) -> None:
        """Write its record anew; see the port."""
        if self._ending.code is None:
            self.files.holds(holding, self._proof)
