"""Workers that live and answer nothing, or whose engine stands still: which of them for too long.

Invariants:
- The time counts from the first question that has no answer. Any answer ends it, however late, and
  be it an error of the worker's own.
- Only time in which this process could hear counts: a longer round of questions counts as
  ROUND_MAX_S, because the machine or this process stood still. Such a round ends nobody: an answer
  may have come that nobody could hear yet. The next round judges, be it as long.
- A worker may answer while its engine does not: its figures are then older each time. An engine has
  ENGINE_PATIENCE times the bound, because a step may take long on a slow machine.
- Workers that others started, that load or that are being stopped have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxd_controller.runtime.ports import Clock
from mlxd_controller.runtime.worker import Worker
from mlxd_shared.ops.logs import get_logger

ROUND_MAX_S = 4.0
"""Twice what a round takes, a pause and a wait of STATUS_POLL_S each."""
LATE_S = 2.5
"""A round of this length is a moment in which this process stood still, or was very busy."""
ENGINE_PATIENCE = 9
"""How many times as long an engine may take for one step as a worker for an answer."""
_log = get_logger("silence")


class Silence:
    """Judges workers after each round of questions. One owner: the runtime."""

    def __init__(self, clock: Clock, *, silent_max_s: float) -> None:
        """Begin; `silent_max_s` math.inf lets workers be silent for ever."""
        self._clock = clock
        self._silent_max_s = silent_max_s
        self._judged_s = clock.now_s()
        self._stood_still = self._looks_again = False

    def note_round(self, workers: Iterable[Worker]) -> None:
        """Note that a round of questions to `workers` is over, and have each count its silence."""
        now_s = self._clock.now_s()
        passed_s, self._judged_s = now_s - self._judged_s, now_s
        self._looks_again = passed_s >= LATE_S and not self._stood_still
        self._stood_still = passed_s >= LATE_S
        for worker in workers:
            worker.attention.note_round(
                min(passed_s, ROUND_MAX_S), now_s, stands_still=worker.stands_still
            )

    def find_hung(self, workers: Iterable[Worker]) -> list[tuple[Worker, str]]:
        """Return those of `workers` that have been silent too long by the last round, and why.

        Those that are ended already are none of them.
        """
        if self._looks_again:
            return []
        problems = ((worker, self._problem(worker)) for worker in workers)
        return [(worker, problem) for worker, problem in problems if problem]

    def _problem(self, worker: Worker) -> str:
        """Return why a worker is to be ended; "" if it is not."""
        if worker.stopping or not worker.local or worker.ended_because:
            return ""
        if worker.attention.silent_s >= self._silent_max_s:
            return f"it gave no answer for {worker.attention.silent_s:.0f} s"
        if worker.attention.still_s >= ENGINE_PATIENCE * self._silent_max_s:
            return f"its engine stood still for {worker.attention.still_s:.0f} s"
        return ""


async def end_hung(worker: Worker) -> None:
    """End a process that hangs; whoever waits for its end tells of it."""
    assert worker.process is not None
    _log.error("worker hangs; it is ended", model=worker.name, reason=worker.ended_because)
    await worker.process.close()
