"""Whatever the threads that make masks are in the middle of, others' masks are made."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llguidance import LLMatcher, LLTokenizer

from mlxd_shared import config
from mlxd_worker.engine.masks.advance import Advance
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.masks.threads import MaskThreads

WAITS_MAX = 3000
"""Of 10 ms at most."""
GO_S = 120.0


class Work(Advance):
    """What stands in the middle of its mask until the test lets it go on."""

    def __init__(self) -> None:
        nothing = LLMatcher(LLTokenizer("byte"), "", log_level=0)
        super().__init__(Constraint(nothing, b"").start(), ())
        self.reached = threading.Event()
        self.go = threading.Event()

    def perform(self, clock: Callable[[], float]) -> None:
        """Wait to be told."""
        del clock
        self.reached.set()
        assert self.go.wait(GO_S)


@contextmanager
def works(count: int) -> Iterator[list[Work]]:
    """Give some, and let all of them go in the end."""
    works_made = [Work() for _ in range(count)]
    try:
        yield works_made
    finally:
        for work in works_made:
            work.go.set()


def step_until(threads: MaskThreads, wanted: Sequence[Work], over: Callable[[], bool]) -> None:
    """Wait for masks, as an engine without anything else to do, until something is so."""
    for waits in itertools.count():
        if over():
            return
        assert waits < WAITS_MAX
        threads.wait(wanted, time.monotonic())
        threads.wait_for_any([work for work in wanted if not work.done])


def test_work_that_was_passed_by_before_it_began_blocks_nobody() -> None:
    """It waited behind a slow one, moved on to other threads, and is slow there."""
    threads = MaskThreads(1, clock=time.monotonic)
    with works(3) as (first, second, quick):
        threads.begin(first)
        threads.begin(second)
        step_until(threads, [first, second], second.reached.is_set)
        quick.go.set()
        threads.begin(quick)

        step_until(threads, [first, second, quick], lambda: quick.done)
        assert not first.done
        assert not second.done


def test_work_whose_row_has_gone_blocks_nobody() -> None:
    """Nobody waits for it any more, so nobody finds out that it takes long."""
    threads = MaskThreads(1, clock=time.monotonic)
    with works(2) as (gone, quick):
        threads.begin(gone)
        threads.wait_for_any([gone])
        assert gone.reached.wait(GO_S)
        gone.abandoned = True
        quick.go.set()
        threads.begin(quick)

        step_until(threads, [quick], lambda: quick.done)
        assert not gone.done


def test_threads_are_replaced_within_a_bound() -> None:
    """Those beyond it wait until one of the threads is free again, and are made then."""
    threads = MaskThreads(1, clock=time.monotonic)
    with works(config.CONSTRAINT_STUCK_MAX + 3) as slow:
        for work in slow:
            threads.begin(work)
        most = config.CONSTRAINT_STUCK_MAX + 1
        step_until(threads, slow, lambda: sum(work.reached.is_set() for work in slow) == most)
        for _ in range(5):
            threads.wait(slow, time.monotonic())
            threads.wait_for_any(slow)
        assert [work.reached.is_set() for work in slow] == [True] * most + [False] * 2

        slow[0].go.set()
        step_until(threads, slow, slow[most].reached.is_set)
        assert not slow[-1].reached.is_set()
        for work in slow:
            work.go.set()
        step_until(threads, slow, lambda: all(work.done for work in slow))
