"""Who is served next: the streams that wait for a row, and the rows that wait for their prefill.

Invariants:
- Pure: times come from the caller; no stream is evaluated, notified or looked up here.
- Streams go by priority, higher first, then deadline, earlier first and none last, then age. Age is
  that of the request: who waited at a worker that died does not stand behind who came since.
- Nobody starves: after `OVERTAKES_MAX` turns in a row that passed the oldest one over, the next is
  the oldest one's. So a stream before which `n` older ones wait is overtaken by at most
  `(n + 1) * OVERTAKES_MAX` younger ones, whatever comes, and priority still gets most of the turns.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from mlxd_worker.engine.request import StreamId, Submit

OVERTAKES_MAX: Final = 8
"""Turns in a row that may pass the oldest one over."""

STALE_MAX: Final = 64
"""Entries of streams that have left, beyond as many as wait, before they are cleared away."""

T = TypeVar("T")


class Turns:
    """Counts the turns in a row that passed the oldest one over."""

    def __init__(self) -> None:
        self._overtaken = 0

    @property
    def oldest_due(self) -> bool:
        """Whether the next turn is the oldest one's."""
        return self._overtaken >= OVERTAKES_MAX

    def note_turn(self, *, by_oldest: bool) -> None:
        """Note a turn."""
        self._overtaken = 0 if by_oldest else self._overtaken + 1

    def first_of(self, by_age: Sequence[T], *, rank: Callable[[T], tuple[float, ...]]) -> T:
        """Return whose turn it is among those that wait, oldest first; it is not noted yet.

        The least rank goes first, of equals the oldest.
        """
        return by_age[0] if self.oldest_due else min(by_age, key=rank)


class WaitingQueue:
    """Streams that wait. Taking the next one costs the logarithm of how many there are."""

    def __init__(self) -> None:
        self._waiting: dict[StreamId, Submit] = {}
        # Heaps keep what has left until it comes to the top or is cleared away; a stream's name is
        # never used twice.
        self._by_age: list[tuple[float, int, StreamId]] = []
        self._by_rank: list[tuple[float, float, float, int, StreamId]] = []
        self._by_deadline: list[tuple[float, StreamId]] = []
        self._pushes = itertools.count()
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Submit]:
        """Go through the streams, oldest first."""
        entries = sorted(entry for entry in self._by_age if entry[-1] in self._waiting)
        return iter([self._waiting[stream] for _, _, stream in entries])

    @property
    def oldest(self) -> Submit | None:
        """The stream that has waited longest."""
        return self._first(self._by_age)

    def push(self, request: Submit) -> None:
        """Take a stream."""
        stream = request.stream
        deadline_s = math.inf if request.deadline_s is None else request.deadline_s
        self._waiting[stream] = request
        age = (request.submitted_s - request.age_s, next(self._pushes), stream)
        heapq.heappush(self._by_age, age)
        heapq.heappush(self._by_rank, (-request.priority, deadline_s, *age))
        if deadline_s < math.inf:
            heapq.heappush(self._by_deadline, (deadline_s, stream))

    def peek(self) -> Submit | None:
        """Return the stream whose turn it is; it stays."""
        if self._turns.oldest_due:
            return self.oldest
        return self._first(self._by_rank)

    def pop(self) -> Submit:
        """Take the stream whose turn it is out; there must be one."""
        request = self.peek()
        assert request is not None, "nobody waits"
        self._turns.note_turn(by_oldest=request is self.oldest)
        self.remove(request.stream)
        return request

    def remove(self, stream: StreamId) -> bool:
        """Forget a stream; False where it does not wait."""
        if self._waiting.pop(stream, None) is None:
            return False
        if max(len(self._by_rank), len(self._by_deadline)) > 2 * len(self) + STALE_MAX:
            heaps: tuple[list[Any], ...] = (self._by_age, self._by_rank, self._by_deadline)
            for heap in heaps:
                heap[:] = [entry for entry in heap if entry[-1] in self._waiting]
                heapq.heapify(heap)
        return True

    def take_late(self, now_s: float) -> list[Submit]:
        """Take out the streams whose deadline has passed, earliest first."""
        late: list[Submit] = []
        deadlines = self._by_deadline
        while deadlines and deadlines[0][0] <= now_s:
            request = self._waiting.pop(heapq.heappop(deadlines)[1], None)
            if request is not None:
                late.append(request)
        return late

    def take_all(self) -> list[Submit]:
        """Take everybody out, oldest first."""
        everybody = list(self)
        self._waiting.clear()
        self._by_age.clear()
        self._by_rank.clear()
        self._by_deadline.clear()
        return everybody

    def _first(self, heap: list[Any]) -> Submit | None:
        """Return the stream at the top of a heap, once what has left is gone from there."""
        while heap and heap[0][-1] not in self._waiting:
            heapq.heappop(heap)
        return self._waiting[heap[0][-1]] if heap else None
