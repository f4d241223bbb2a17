"""Where matchers go on and make masks while the engine thread steps: a few threads of their own.

Invariants:
- What takes its usual microseconds is waited for, whatever takes longer is passed by: a step waits
  once for an `Advance`, and at most CONSTRAINT_MASK_WAIT_S. Where a row's masks are slow
  (`Matcher.is_slow`), it is not waited for at all beside others.
- Slow rows share one thread, in the order in which they ask. The threads that are passed by in the
  middle of a mask are replaced, so that they keep nobody else waiting, and end with it; there are
  at most CONSTRAINT_STUCK_MAX.
- All threads have one priority: one that was preempted with the interpreter would hold all others.
- Nothing here can be interrupted. What the library does for one mask is bounded by its own counts;
  a row that has gone leaves it no more than the call at hand.
- A thread is started with the first work for it, and none outlives this object and its work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from mlxd_shared import config
from mlxd_worker.engine.constraint import Advance


class MaskThreads:
    """The threads of one engine. One owner: the engine thread."""

    def __init__(self, threads: int, *, clock: Callable[[], float]) -> None:
        """Make quick masks on so many threads at once."""
        self._threads = threads
        self._clock = clock
        self._quick = _Lane(threads, self._perform)
        self._slow = ThreadPoolExecutor(1, "slow-mask")
        self._stuck: list[Advance] = []
        self._change = threading.Condition()
        self._awaited: frozenset[Advance] = frozenset()
        self._missing = 0

    def begin(self, work: Advance) -> None:
        """Have it performed; what is quick begins with the next wait."""
        if work.matcher.is_slow:
            work.passed = True
            self._slow.submit(self._perform, work)
        else:
            self._quick.todo.append(work)

    def wait(self, works: Iterable[Advance]) -> None:
        """Wait for those that nobody has waited for yet."""
        self._quick.call()
        fresh = [work for work in works if not work.passed and not work.done]
        if fresh and not self._arrive(fresh, len(fresh)):
            self._pass_by(fresh)

    def wait_for_any(self, works: Sequence[Advance]) -> None:
        """Wait, not for long, until one of them is done: nobody else has anything to do."""
        self._quick.call()
        self._arrive(works, 1)

    def _arrive(self, works: Sequence[Advance], count: int) -> bool:
        """Wait until so many of them are done; False where that takes too long."""
        with self._change:
            self._awaited = frozenset(work for work in works if not work.done)
            self._missing = count - (len(works) - len(self._awaited))
            arrived = self._change.wait_for(
                lambda: self._missing <= 0, timeout=config.CONSTRAINT_MASK_WAIT_S
            )
            self._awaited = frozenset()
        return arrived

    def _pass_by(self, works: Iterable[Advance]) -> None:
        """Leave those alone that are not done, and have others do what waits behind them."""
        late = [work for work in works if not work.done]
        for work in late:
            work.passed = True
        begun = [work for work in late if work.begun]
        self._stuck = [work for work in self._stuck if not work.done] + begun
        if not begun or len(self._stuck) > config.CONSTRAINT_STUCK_MAX:
            return
        lane, self._quick = self._quick, _Lane(self._threads, self._perform)
        self._quick.todo.extend(lane.retire())
        self._quick.call()

    def _perform(self, work: Advance) -> None:
        work.begun = True
        try:
            work.perform(self._clock)
        finally:
            with self._change:
                work.done = True
                if work in self._awaited:
                    self._missing -= 1
                    if self._missing <= 0:
                        self._change.notify()


class _Lane:
    """Threads that share what there is to do, one after another."""

    def __init__(self, threads: int, perform: Callable[[Advance], None]) -> None:
        self.todo: deque[Advance] = deque()
        self._threads = threads
        self._perform = perform
        self._pool = ThreadPoolExecutor(threads, "mask")
        self._retired = False

    def call(self) -> None:
        """Call threads to what there is to do."""
        for _ in range(min(len(self.todo), self._threads)):
            self._pool.submit(self._work)

    def retire(self) -> list[Advance]:
        """Let the threads end with what they are at; return what is left to others."""
        self._retired = True
        self._pool.shutdown(wait=False)
        return list(self._left())

    def _work(self) -> None:
        for work in self._left():
            self._perform(work)
            if self._retired:
                return

    def _left(self) -> Iterable[Advance]:
        with suppress(IndexError):
            while True:
                yield self.todo.popleft()
