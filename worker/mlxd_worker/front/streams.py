"""The streams in flight, by request id: an idempotency key while it lasts.

Invariants:
- A request id names at most one stream at a time.
- The number of streams is bounded here already, before anything is spent on one. Whoever is
  refused is told when a place is likely to be free.
- Event loop only. `idle` is set exactly while no stream is in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxd_shared import config
from mlxd_shared.domain.errors import DuplicateRequest, QueueFull
from mlxd_worker.engine.request import StreamId
from mlxd_worker.front.appointments import Appointments


class Streams:
    """Who is being served."""

    def __init__(
        self,
        *,
        waiting_max: int = config.WAITING_STREAMS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with none; at most `waiting_max` may wait beside those that run."""
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
        """Hold `request_id` while the stream lasts; yield the engine's name for it.

        Raises:
            DuplicateRequest: a stream of this id is in flight.
            QueueFull: `rows_max` streams run and as many wait as may.
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
