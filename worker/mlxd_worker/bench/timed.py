"""The sink of a stream that is timed: when its tokens came, as its engine tells them."""

from __future__ import annotations

import time

from mlxd_shared.ops.measuring import Outcome
from mlxd_worker.engine.request import Event, Failed


class Timed:
    """Implements Sink. One owner: the thread that steps the engine."""

    def __init__(self) -> None:
        """Begin now."""
        self._sent_s = time.perf_counter()
        self._stamps_s: list[float] = []
        self._counts: list[int] = []

    def put(self, event: Event) -> None:
        """Note the time of an event with tokens; raises the error of a stream that has failed."""
        now_s = time.perf_counter()
        if isinstance(event, Failed):
            raise event.error
        if event.ids:
            self._stamps_s.append(now_s)
            self._counts.append(len(event.ids))

    @property
    def outcome(self) -> Outcome:
        """What has come."""
        return Outcome(self._sent_s, tuple(self._stamps_s), tuple(self._counts), "")
