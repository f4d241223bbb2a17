"""One worker: its launch, its process, what it reports of itself, and the streams sent to it.

One owner, the runtime: others read it, and change it only through its `note_` methods.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import islice

from mlxd_controller.memory.device import family_of, killed_from_outside, usage_of
from mlxd_controller.runtime.ports import END_WITH_MACHINE, RawStream, WorkerLink, WorkerProcess
from mlxd_models.fit.measured import Figures
from mlxd_models.fit.plan import Plan
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, WorkerExited, WorkerStartFailed
from mlxd_shared.domain.figures import ProcessStatus, WorkerFigures

ENGINE_STILL_S = 2 * config.STATUS_POLL_S
"""Figures of this age predate the last question: the engine has not reached it."""
CAUSE_WAIT_S = 1.0


@dataclass(slots=True)
class Attention:
    """How long a worker has not answered, and its engine made no progress; see `silence`."""

    question_s: float | None = None
    """The time of the first unanswered question."""
    silent_s: float = 0.0
    still_s: float = 0.0

    def note_question(self, now_s: float) -> None:
        """Note a question; only the first unanswered one counts."""
        if self.question_s is None:
            self.question_s = now_s

    def note_answer(self) -> None:
        """Note an answer."""
        self.question_s, self.silent_s = None, 0.0

    def note_round(self, round_s: float, now_s: float, *, stands_still: bool) -> None:
        """Note the end of a round; for `round_s` of it answers could be received."""
        if self.question_s is not None:
            self.silent_s += min(round_s, now_s - self.question_s)
        self.still_s = self.still_s + round_s if stands_still else 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One launch, from its first moment to after its end."""

    number: int
    digest: str
    name: str
    path: str
    plan: Plan
    incarnation: str
    started_unix_s: float
    local: bool = True
    """Whether `process.pid` is a process of this machine."""
    endable: bool = True
    """Whether closing `process` ends it."""
    oom_kills: int | None = None
    """How many processes the kernel had killed for lack of memory by the launch."""
    process: WorkerProcess | None = None
    failed_start: WorkerStartFailed | None = None
    """Why there never was a `process`: what is known of one that ended before it listened."""
    link: WorkerLink | None = None
    loading: asyncio.Task[None] | None = None
    ready_s: float | None = None
    """When its model became ready."""
    stopping: bool = False
    error: MlxdError | None = None
    ended_s: float = 0.0
    """When its end was noticed."""
    figures: WorkerFigures | None = None
    figures_s: float = 0.0
    last_figures: Figures | None = None
    """The figures the scheduler has last been told."""
    cpu_s: float = 0.0
    """The highest CPU time seen: a counter, which must not fall when the process has gone."""
    resident_nbytes: int | None = None
    """What the process holds, as the system last reported; None if it has not."""
    polling: asyncio.Task[None] | None = field(default=None, repr=False)
    attention: Attention = field(default_factory=Attention)
    streams: dict[RawStream, None] = field(default_factory=dict)
    """Streams sent to it that have not ended, or ended with it; oldest first."""
    ended_because: str = ""
    """Why the controller ends the process while streams run on it; "" if it does not."""

    @property
    def exit_code(self) -> int | None:
        """None while it lives, or never lived."""
        if self.process is not None:
            return self.process.exit_code
        return self.failed_start.code if isinstance(self.failed_start, WorkerExited) else None

    @property
    def stands_still(self) -> bool:
        """Whether its engine is still at the same step as at the last question."""
        if self.figures is None or self.loading is not None:
            return False
        return (self.figures.age_s or 0.0) >= ENGINE_STILL_S

    def has_begun(self, stream: RawStream) -> bool:
        """Return whether a stream had its turn, judged by age: it did not just wait."""
        return stream in islice(self.streams, self.plan.rows_max)

    def pids(self, process: WorkerProcess) -> tuple[int, ...]:
        """Return the process ids of `process`, its own, and of all its ranks."""
        if self.plan.ranks == 1:
            return (process.pid,)
        ranks = () if self.figures is None else self.figures.memory.ranks
        return tuple(rank.pid for rank in ranks if rank.pid) or family_of(process.pid)

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of output."""
        if self.process is not None:
            return self.process.last_lines()
        return () if self.failed_start is None else self.failed_start.last_lines

    async def wait_ended(self, *, wait_s: float) -> bool:
        """Return whether its process has ended; wait at most `wait_s` for that."""
        if self.process is None:
            return False
        waiting = asyncio.create_task(self.process.wait_exited())
        await asyncio.wait({waiting}, timeout=wait_s)
        waiting.cancel()
        return self.process.exit_code is not None

    async def cause(self) -> str:
        """Return what ended it, once known; "" if it seems to live."""
        await self.wait_ended(wait_s=CAUSE_WAIT_S)
        return "" if self.exit_code is None else self.describe_end(self.exit_code)

    def describe_end(self, code: int) -> str:
        """Describe its end for people; `code` is the exit code, negative for a signal."""
        if code == END_WITH_MACHINE:
            return "its machine was lost"
        return self.ended_because or (f"signal {-code}" if code < 0 else f"exit code {code}")

    def was_killed(self, oom_kills: int | None) -> bool:
        """Return whether it was killed through no fault of its own; `oom_kills`: the count now."""
        if self.ended_because:  # it hung
            return False
        if self.exit_code == END_WITH_MACHINE:
            return True
        return killed_from_outside(self.exit_code, before=self.oom_kills, now=oom_kills)

    def note_status(self, status: ProcessStatus, now_s: float) -> None:
        """Keep what the process reports of its worker, if there is one."""
        if status.workers:
            self.note_figures(status.workers[0], now_s)

    def note_figures(self, figures: WorkerFigures, now_s: float) -> None:
        """Keep what the worker reports of itself."""
        self.figures, self.figures_s = figures, now_s
        self.cpu_s = max(self.cpu_s, figures.cpu_s)

    def figures_age_s(self, now_s: float) -> float:
        """Return how old the worker's figures are; 0 where it has reported none.

        A busy worker reports figures of some age; they have aged further since.
        """
        if self.figures is None:
            return 0.0
        return (self.figures.age_s or 0.0) + max(0.0, now_s - self.figures_s)

    def note_process(self) -> None:
        """Record the system's figures of the process; a remote worker reports its own."""
        self.resident_nbytes = None
        if self.process is None or self.process.exit_code is not None or not self.local:
            return
        usage = usage_of(self.process.pid)
        if usage is not None:
            self.resident_nbytes = usage.resident_nbytes
            self.cpu_s = max(self.cpu_s, usage.cpu_s)
