"""Workers that live and answer nothing, or whose engine stands still: which of them for too long.

Invariants:
- The time counts from the first question that has no answer. Any answer ends it, however late, and
  be it an error of the worker's own.
- Only time in which this process could hear counts: a round of questions that took longer than
  ROUND_MAX_S, since the machine or this process stood still, counts as ROUND_MAX_S.
- A round in which this process stood still ends nobody: an answer may have come that nobody could
  hear yet. The next round judges, be it as long.
- A worker may answer while its engine does not: its figures are then older each time. Since a step
  of a large model on a slow machine may take long, an engine has ENGINE_PATIENCE times the bound.
- Workers that others started, that load or that are being stopped have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxd_controller.ports import Clock
from mlxd_controller.workers import Worker
from mlxd_shared.logs import get_logger

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
        self._stood_still = False

    def hung(self, workers: Iterable[Worker]) -> list[Worker]:
        """Return those of `workers` that have been silent too long, each of them once.

        To be called after each round of questions.
        """
        now_s = self._clock.now_s()
        passed_s, self._judged_s = now_s - self._judged_s, now_s
        round_s = min(passed_s, ROUND_MAX_S)
        look_again = passed_s >= LATE_S and not self._stood_still
        self._stood_still = passed_s >= LATE_S
        found = []
        for worker in workers:
            if worker.asked_s is not None:
                worker.silent_s += min(round_s, now_s - worker.asked_s)
            worker.still_s = worker.still_s + round_s if worker.stands_still else 0.0
            if look_again or worker.stopping or not worker.local or worker.ended_because:
                continue
            if worker.silent_s >= self._silent_max_s:
                worker.ended_because = f"it gave no answer for {worker.silent_s:.0f} s"
            elif worker.still_s >= ENGINE_PATIENCE * self._silent_max_s:
                worker.ended_because = f"its engine stood still for {worker.still_s:.0f} s"
            if worker.ended_because:
                found.append(worker)
        return found


async def end_hung(worker: Worker) -> None:
    """End a process that hangs; whoever waits for its end tells of it."""
    assert worker.process is not None
    _log.error("worker hangs; it is ended", model=worker.name, reason=worker.ended_because)
    await worker.process.close()
