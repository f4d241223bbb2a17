"""The streams in flight, by request id, and when refused clients should retry.

Invariants:
- A request id names at most one stream at a time.
- The number of streams is limited here already, before anything is spent on one.
- Clients refused at the same moment get increasing retry times, so that they come back one by one,
  no faster than places become free; within RETRY_MIN_S and RETRY_MAX_S, however many are refused.
- Event loop only. `idle` is set exactly while no stream is in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.errors import DuplicateRequest, QueueFull
from mlxd_worker.engine.request import StreamId

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 300.0

GUESS_S: Final = 1.0
"""The assumed least duration of a stream before any was measured."""

MARGIN: Final = 1.25
"""How much wider than places retries are spaced: streams end in groups, and new ones come."""

ROUNDS_SEEN: Final = 4
"""The rate is measured over this many streams per row; fewer would show single groups."""

GOLDEN: Final = 0.6180339887498949
"""The fractional parts of its multiples stay apart from one another."""


class Appointments:
    """Measures how often places become free, and spreads the retries of those who wait for one.

    Times come from the caller, on one clock that never goes back.
    """

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque()
        self._full_since_s: float | None = None
        self._last_s = float("-inf")
        self._beyond = 0

    def note_end(self, now_s: float, *, rows_max: int, others_waited: bool) -> None:
        """Note that a stream has ended; only ends while others waited tell the rate."""
        if not others_waited:
            self._ends_s.clear()
            self._full_since_s = None
            return
        self._ends_s.append(now_s)
        while len(self._ends_s) > ROUNDS_SEEN * rows_max + 1:
            self._ends_s.popleft()

    def interval_s(self, now_s: float, *, rows_max: int) -> float:
        """Return the seconds between two places given back."""
        seen = len(self._ends_s) - 1
        if seen < rows_max or now_s <= self._ends_s[0]:
            # Assume that streams take as long as they have taken so far, or as long again.
            since_s = now_s if self._full_since_s is None else self._full_since_s
            return max(GUESS_S, now_s - since_s) / rows_max
        return (now_s - self._ends_s[0]) / seen

    def give(self, now_s: float, *, rows_max: int) -> float:
        """Return in how many seconds one more refused client should retry."""
        if self._full_since_s is None:
            self._full_since_s = now_s
        each_s = self.interval_s(now_s, rows_max=rows_max) * MARGIN
        # Not before the running ones have ended: streams that began together end together.
        soonest_s = now_s + max(rows_max * each_s, RETRY_MIN_S)
        wanted_s = max(self._last_s + each_s, soonest_s)
        if wanted_s > now_s + RETRY_MAX_S:
            self._beyond += 1
            part = self._beyond * GOLDEN % 1.0
            return RETRY_MAX_S * (1.0 + part) / 2.0
        self._last_s = wanted_s
        return max(wanted_s - now_s, RETRY_MIN_S)


class Streams:
    """The streams being served."""

    def __init__(
        self,
        *,
        waiting_max: int = config.WAITING_STREAMS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `waiting_max` streams may wait besides those that run."""
        self.waiting_max = waiting_max
        self.idle = asyncio.Event()
        self._clock = clock
        self._appointments = Appointments()
        self.idle.set()
        self._in_flight: set[str] = set()
        self._next = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    @contextmanager
    def open(self, request_id: str, *, rows_max: int) -> Iterator[StreamId]:
        """Reserve `request_id` while the stream lasts; yield the engine's name for it.

        Raises:
            DuplicateRequest: a stream with this id is in flight.
            QueueFull: `rows_max` streams run, and the maximum number waits.
        """
        if request_id in self._in_flight:
            raise DuplicateRequest(request_id)
        if len(self) >= rows_max + self.waiting_max:
            retry_after_s = self._appointments.give(self._clock(), rows_max=rows_max)
            raise QueueFull("waiting streams", self.waiting_max, retry_after_s)
        self._in_flight.add(request_id)
        self.idle.clear()
        self._next += 1
        try:
            yield StreamId(self._next)
        finally:
            self._in_flight.remove(request_id)
            others_waited = len(self) >= rows_max
            self._appointments.note_end(
                self._clock(), rows_max=rows_max, others_waited=others_waited
            )
            if not self._in_flight:
                self.idle.set()

    async def drain(self, grace_s: float) -> int:
        """Wait until no stream is in flight, at most `grace_s`; return how many are left."""
        try:
            await asyncio.wait_for(self.idle.wait(), grace_s)
        except TimeoutError:
            return len(self)
        return 0
