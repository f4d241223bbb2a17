"""Where matchers go on and make masks while the engine thread steps: a few threads of their own.

Invariants:
- What takes its usual microseconds is waited for, whatever takes longer is passed by: a step waits
  at most CONSTRAINT_MASK_WAIT_S, and once for an `Advance` that a thread is at. Where a row's masks
  are slow (`Matcher.is_slow`), it is not waited for at all beside others.
- Slow rows share one thread, in the order in which they ask. The threads that are passed by in the
  middle of a mask are replaced, so that they block no other work, and end with it; there are
  at most CONSTRAINT_STUCK_MAX. What they are in the middle of is known by the lane, not by who
  waits: that row may have gone, or have been passed by before its work began.
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

from mlxd_shared import config
from mlxd_worker.engine.masks.advance import Advance


class MaskThreads:
    """The threads of one engine. One owner: the engine thread."""

    def __init__(self, threads: int, *, clock: Callable[[], float]) -> None:
        """Make quick masks on `threads` threads at once."""
        self._threads = threads
        self._clock = clock
        self._quick = _Lane(threads, self._perform)
        """Replaced by another lane if steps go on without its current work (`passed`)."""
        self._slow = ThreadPoolExecutor(1, "slow-mask")
        self._stuck: list[Advance] = []
        """The current work of replaced threads."""
        self._change = threading.Condition()
        self._awaited: frozenset[Advance] = frozenset()
        self._missing = 0

    def begin(self, work: Advance) -> None:
        """Queue work; quick work starts with the next wait."""
        if work.matcher.is_slow:
            work.passed = True
            self._slow.submit(self._perform, work)
        else:
            self._quick.add(work)

    def wait(self, works: Sequence[Advance], now_s: float) -> None:
        """Wait for those not yet waited for, and see how far each of them is at `now_s`."""
        self._make_way()
        self._quick.call()
        fresh = [work for work in works if not work.passed and not work.done]
        if fresh and not self._arrive(fresh, len(fresh)):
            self._pass_by(fresh)
        for work in works:
            work.look(now_s)

    def wait_for_any(self, works: Sequence[Advance]) -> None:
        """Wait, not for long, until one of them is done: no other row can step."""
        self._quick.call()
        self._arrive(works, 1)

    def _arrive(self, works: Sequence[Advance], count: int) -> bool:
        """Wait until `count` of them are done; False if that takes too long."""
        with self._change:
            self._awaited = frozenset(work for work in works if not work.done)
            self._missing = count - (len(works) - len(self._awaited))
            arrived = self._change.wait_for(
                lambda: self._missing <= 0, timeout=config.CONSTRAINT_MASK_WAIT_S
            )
            self._awaited = frozenset()
        return arrived

    def _pass_by(self, works: Iterable[Advance]) -> None:
        """Leave alone what takes long; what only waits behind that is waited for again."""
        for work in self._quick.at:
            work.passed = True
        if self._make_way():
            return
        for work in works:
            work.passed = True

    def _make_way(self) -> bool:
        """Have other threads take over what waits behind slow work; False: none can."""
        held = [work for work in self._quick.at if work.passed and not work.done]
        stuck = [work for work in self._stuck if not work.done]
        room = len(stuck) + len(held) <= config.CONSTRAINT_STUCK_MAX
        if not held or not self._quick.waiting or not room:
            return False
        at, left = self._quick.retire()
        self._stuck = [*stuck, *at]
        self._quick = _Lane(self._threads, self._perform)
        for work in left:
            self._quick.add(work)
        self._quick.call()
        return True

    def _perform(self, work: Advance) -> None:
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
        self._threads = threads
        self._perform = perform
        self._pool = ThreadPoolExecutor(threads, "mask")
        self._lock = threading.Lock()
        self._todo: deque[Advance] = deque()
        self._at: set[Advance] = set()
        self._retired = False

    @property
    def at(self) -> list[Advance]:
        """What its threads are in the middle of."""
        with self._lock:
            return list(self._at)

    @property
    def waiting(self) -> bool:
        """Whether something has not begun."""
        return bool(self._todo)

    def add(self, work: Advance) -> None:
        """Have it done once threads are called."""
        self._todo.append(work)

    def call(self) -> None:
        """Call threads to what there is to do."""
        for _ in range(min(len(self._todo), self._threads)):
            self._pool.submit(self._work)

    def retire(self) -> tuple[list[Advance], list[Advance]]:
        """End the threads after their current work; return that, and the work left over."""
        with self._lock:
            self._retired = True
            at, left = list(self._at), list(self._todo)
        self._pool.shutdown(wait=False)
        return at, left

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                self._perform(work)
            finally:
                with self._lock:
                    self._at.discard(work)

    def _next(self) -> Advance | None:
        with self._lock:
            if self._retired or not self._todo:
                return None
            work = self._todo.popleft()
            self._at.add(work)
            return work
