"""Who is cut off while an answer is written: who takes nothing, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlxd_gateway.stalls import StallWatch


@dataclass(slots=True)
class Pending:
    """A call that comes when a test has it come."""

    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Have it not come."""
        self.is_cancelled = True


@dataclass(slots=True)
class Line:
    """A connection with so much left to send."""

    left_nbytes: int = 100
    ends: int = 0
    timers: list[Pending] = field(default_factory=list)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Pending:
        """Keep a call for later."""
        assert delay_s == 60.0
        self.timers.append(Pending(call))
        return self.timers[-1]

    def pass_time(self) -> None:
        """Have the last call come, unless it was cancelled."""
        if not self.timers[-1].is_cancelled:
            self.timers[-1].call()

    def end(self) -> None:
        """Be cut off."""
        self.ends += 1

    def watch(self) -> StallWatch:
        """Return a watch over it."""
        return StallWatch(self.call_later, lambda: self.left_nbytes, self.end, limit_s=60.0)


def test_one_byte_is_progress() -> None:
    """However slow, a reader is waited for; from the moment on that it stands still, no longer."""
    line = Line()
    line.watch().begin()
    for _ in range(3):
        line.left_nbytes -= 1
        line.pass_time()
    assert (line.ends, len(line.timers)) == (0, 4)
    line.pass_time()
    assert (line.ends, len(line.timers)) == (1, 4)


def test_who_reads_on_is_watched_no_longer() -> None:
    """Until the next pause, which counts anew."""
    line = Line()
    watch = line.watch()
    watch.begin()
    watch.stop()
    line.pass_time()
    assert line.ends == 0
    line.left_nbytes = 500
    watch.begin()
    line.left_nbytes = 499
    line.pass_time()
    assert line.ends == 0
