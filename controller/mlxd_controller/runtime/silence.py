"""Finds workers that hang: they have not answered, or their engine has made no progress, too long.

Invariants:
- Time counts from the first unanswered question. Any answer, however late, resets it, even one that
  reports an error of the worker's.
- Only time in which this process could receive answers counts: a longer round of questions counts
  as ROUND_MAX_S, because the machine or this process was suspended. Such a round ends no worker:
  an answer may have arrived that nobody could read yet. The next round judges, however long it is.
- A worker may answer while its engine hangs: its figures then get older each time. An engine is
  given ENGINE_PATIENCE times the limit, because a step may take long on a slow machine.
- Workers started by others, and workers that load or are being stopped, have limits of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxd_controller.runtime.ports import Clock
from mlxd_controller.runtime.worker import Worker
from mlxd_shared.ops.logs import get_logger

ROUND_MAX_S = 4.0
"""Twice the length of a round, which is a pause and a wait of STATUS_POLL_S each."""
LATE_S = 2.5
"""In a round of this length this process was suspended, or very busy."""
ENGINE_PATIENCE = 9
"""How many times longer an engine may take for a step than a worker for an answer."""
_log = get_logger("silence")


class Silence:
    """Judges workers after each round of questions. One owner: the runtime."""

    def __init__(self, clock: Clock, *, silent_max_s: float) -> None:
        """silent_max_s: how long a worker may be silent; math.inf: for ever."""
        self._clock = clock
        self._silent_max_s = silent_max_s
        self._judged_s = clock.now_s()
        self._stood_still = self._looks_again = False

    def note_round(self, workers: Iterable[Worker]) -> None:
        """Note the end of a round of questions to `workers`, and count each one's silence."""
        now_s = self._clock.now_s()
        passed_s, self._judged_s = now_s - self._judged_s, now_s
        self._looks_again = passed_s >= LATE_S and not self._stood_still
        self._stood_still = passed_s >= LATE_S
        for worker in workers:
            worker.attention.note_round(
                min(passed_s, ROUND_MAX_S), now_s, stands_still=worker.stands_still
            )

    def find_hung(self, workers: Iterable[Worker]) -> list[tuple[Worker, str]]:
        """Return the workers that were silent too long at the end of the last round, and why.

        Those that are being ended already are left out.
        """
        if self._looks_again:
            return []
        problems = ((worker, self._problem(worker)) for worker in workers)
        return [(worker, problem) for worker, problem in problems if problem]

    def _problem(self, worker: Worker) -> str:
        """Return why a worker is to be ended; "" if it is not."""
        if worker.stopping or not worker.endable or worker.ended_because:
            return ""
        if worker.attention.silent_s >= self._silent_max_s:
            return f"it did not answer for {worker.attention.silent_s:.0f} s"
        if worker.attention.still_s >= ENGINE_PATIENCE * self._silent_max_s:
            return f"its engine made no progress for {worker.attention.still_s:.0f} s"
        return ""


async def end_hung(worker: Worker) -> None:
    """End a process that hangs; whoever watches the process reports its end."""
    assert worker.process is not None
    _log.error("worker hangs; ending it", model=worker.name, reason=worker.ended_because)
    await worker.process.close()
