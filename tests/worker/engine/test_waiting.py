"""Who is served next: the order of waiting streams, and that nobody waits for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.engine.waiting import OVERTAKES_MAX, STALE_MAX, Turns, WaitingQueue
from tests.support.engines import GREEDY, Collected

PUSH, POP, REMOVE, LATE = range(4)
PRIORITIES = st.integers(-2, 2)
DEADLINES = st.none() | st.integers(0, 40).map(float)
PROGRAMS = st.lists(
    st.tuples(st.sampled_from([PUSH, PUSH, POP, REMOVE, LATE]), PRIORITIES, DEADLINES), max_size=120
)


def stream(
    number: int, *, priority: int = 0, deadline_s: float | None = None, age_s: float = 0.0
) -> Submit:
    """Return a stream of one token."""
    return Submit(
        stream=StreamId(number),
        prompt=(5,),
        sampling=GREEDY,
        max_tokens=1,
        stop=(),
        stop_token_ids=frozenset(),
        eos_ids=frozenset(),
        skip_special_tokens=True,
        submitted_s=0.0,
        sink=Collected(),
        priority=priority,
        deadline_s=deadline_s,
        age_s=age_s,
    )


def queue_of(*requests: Submit) -> WaitingQueue:
    """Return a queue into which these came in this order."""
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
    return queue


def drain(queue: WaitingQueue) -> list[int]:
    """Return the names of all streams in the order in which they are served."""
    return [queue.pop().stream for _ in range(len(queue))]


def test_priority_then_deadline_then_age() -> None:
    """Higher priority first, among these the earlier deadline, none last, among these the older."""
    queue = queue_of(
        stream(1),
        stream(2, deadline_s=9.0),
        stream(3, priority=1),
        stream(4, deadline_s=5.0),
        stream(5, priority=1, deadline_s=99.0),
        stream(6),
        stream(7, priority=-1, deadline_s=1.0),
    )

    assert drain(queue) == [5, 3, 4, 2, 1, 6, 7]


def test_age_is_the_requests_own() -> None:
    """Who waited elsewhere before goes first among equals, and is the oldest of all."""
    queue = queue_of(
        stream(1), stream(2, age_s=5.0), stream(3, age_s=9.0), stream(4, priority=1, age_s=1.0)
    )

    assert queue.oldest is not None
    assert queue.oldest.stream == StreamId(3)
    assert [request.stream for request in queue] == [3, 2, 4, 1]
    assert drain(queue) == [4, 3, 2, 1]


def test_the_oldest_is_served_after_so_many_were_before_it() -> None:
    """Whatever comes, the oldest one is passed over OVERTAKES_MAX times in a row and no more."""
    queue = queue_of(stream(0, priority=-5))
    served: list[int] = []
    for number in range(1, 30):
        queue.push(stream(number, priority=number))
        served.append(queue.pop().stream)

    assert served.index(StreamId(0)) == OVERTAKES_MAX


def test_priority_keeps_most_of_the_turns() -> None:
    """While a crowd of low priority waits, high priority still gets all turns but one in nine."""
    queue = queue_of(*(stream(number, priority=-1) for number in range(100)))
    served: list[int] = []
    for number in range(100, 190):
        queue.push(stream(number, priority=1))
        served.append(queue.pop().stream)

    assert sum(number < 100 for number in served) == 90 // (OVERTAKES_MAX + 1)


def test_peeking_changes_nothing() -> None:
    """Who is shown is who is taken, however often one looks."""
    queue = queue_of(stream(1), stream(2, priority=1))
    first = queue.peek()

    assert first is queue.peek() is queue.pop()
    assert WaitingQueue().peek() is None


def test_late_streams_are_taken_out_once() -> None:
    """A deadline is passed when its moment has come; whoever has none is never late."""
    queue = queue_of(stream(1, deadline_s=5.0), stream(2), stream(3, deadline_s=2.0))

    assert queue.take_late(1.9) == []
    assert [request.stream for request in queue.take_late(5.0)] == [3, 1]
    assert queue.take_late(math.inf) == []
    assert drain(queue) == [2]


def test_what_has_left_is_forgotten() -> None:
    """However many streams come and go, the queue keeps a bounded trace of them."""
    queue = queue_of(stream(0, deadline_s=1e9))
    for number in range(1, 2000):
        queue.push(stream(number, priority=-1, deadline_s=1e6 + number))
        assert queue.remove(StreamId(number))
        assert not queue.remove(StreamId(number))
        assert max(len(queue._by_rank), len(queue._by_deadline)) <= 2 + STALE_MAX + 1

    assert drain(queue) == [0]


def test_everybody_leaves_at_once() -> None:
    """All are given back, oldest first, and nothing of them is left."""
    queue = queue_of(stream(1), stream(2, priority=1, deadline_s=3.0))

    assert [request.stream for request in queue.take_all()] == [1, 2]
    assert not queue
    assert queue.peek() is None
    assert queue.take_late(9.0) == []


@dataclass(slots=True)
class _Naive:
    """The same queue as a plain list, and who overtook whom."""

    waiting: list[Submit] = field(default_factory=list)
    overtaken: dict[int, int] = field(default_factory=dict)
    older: dict[int, int] = field(default_factory=dict)
    in_a_row: int = 0

    def push(self, request: Submit) -> None:
        self.older[request.stream] = len(self.waiting)
        self.overtaken[request.stream] = 0
        self.waiting.append(request)

    def pop(self) -> Submit:
        def rank(request: Submit) -> tuple[float, float]:
            deadline_s = math.inf if request.deadline_s is None else request.deadline_s
            return (-request.priority, deadline_s)

        due = self.in_a_row >= OVERTAKES_MAX
        chosen = self.waiting[0] if due else min(self.waiting, key=rank)
        at = self.waiting.index(chosen)
        self.in_a_row = self.in_a_row + 1 if at else 0
        for request in self.waiting[:at]:
            self.overtaken[request.stream] += 1
        del self.waiting[at]
        return chosen

    def late(self, now_s: float) -> set[int]:
        gone = {r.stream for r in self.waiting if r.late(now_s)}
        self.waiting = [r for r in self.waiting if r.stream not in gone]
        return set(gone)


@given(PROGRAMS)
def test_it_does_what_a_plain_list_does(program: list[tuple[int, int, float | None]]) -> None:
    """The same streams in the same order as by looking at all of them every time."""
    queue, naive, now_s = WaitingQueue(), _Naive(), 0.0
    for number, (step, priority, deadline_s) in enumerate(program):
        if step == PUSH:
            request = stream(number, priority=priority, deadline_s=deadline_s)
            queue.push(request)
            naive.push(request)
        elif step == POP and naive.waiting:
            assert queue.pop() is naive.pop()
        elif step == REMOVE and naive.waiting:
            gone = naive.waiting.pop(number % len(naive.waiting))
            assert queue.remove(gone.stream)
        elif step == LATE:
            now_s += 1.0
            assert {request.stream for request in queue.take_late(now_s)} == naive.late(now_s)
        assert len(queue) == len(naive.waiting)
        assert queue.oldest is (naive.waiting[0] if naive.waiting else None)


@given(PROGRAMS)
def test_nobody_is_overtaken_more_than_the_bound(
    program: list[tuple[int, int, float | None]],
) -> None:
    """Before whom `n` wait when it comes, (n + 1) * OVERTAKES_MAX younger ones go at most."""
    queue, naive = WaitingQueue(), _Naive()
    for number, (step, priority, deadline_s) in enumerate(program * 3):
        if step == PUSH or not queue:
            request = stream(number, priority=priority, deadline_s=deadline_s)
            queue.push(request)
            naive.push(request)
        else:
            assert queue.pop() is naive.pop()
        for name, overtaken in naive.overtaken.items():
            assert overtaken <= (naive.older[name] + 1) * OVERTAKES_MAX


def test_turns_among_a_list() -> None:
    """The least rank is chosen, of equals the oldest, until the oldest one is due."""
    turns, ranks = Turns(), {"a": 3.0, "b": 1.0, "c": 1.0}
    chosen = []
    for _ in range(OVERTAKES_MAX + 2):
        chosen.append(turns.first_of("abc", rank=lambda name: (ranks[name],)))
        turns.note_turn(by_oldest=chosen[-1] == "a")

    assert chosen == [*"b" * OVERTAKES_MAX, "a", "b"]
