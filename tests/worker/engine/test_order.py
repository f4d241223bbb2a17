"""Who is admitted, evaluated and given up when, on a tiny model and a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import pytest

from mlxd_shared.domain.errors import DeadlinePassed, InternalError
from mlxd_worker.cache.prefix.lookup import begin_alike
from mlxd_worker.engine.request import Failed
from mlxd_worker.engine.waiting import OVERTAKES_MAX
from tests.support.clocks import Clock
from tests.support.engines import Collected, TinyEngine, tiny_engine
from tests.support.tiny_model import write_tiny_model
from tests.worker.engine.test_loop import prompt_of

CHUNK = 64
FLOOR = 32
"""What a step evaluates beside rows that decode where the clock says that nothing takes time."""
AMPLE = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


def order_of_first(tiny: TinyEngine, sinks: list[Collected]) -> list[int]:
    """Run to the end; return the sinks' numbers in the order of their first events."""
    started: list[int] = []
    while tiny.engine.busy:
        tiny.engine.step()
        started += [n for n, sink in enumerate(sinks) if sink.events and n not in started]
    return started


def steps_to_first(tiny: TinyEngine, sink: Collected) -> int:
    """Step until the stream has its first event; return how many steps that took."""
    for step in range(1, 1000):
        tiny.engine.step()
        if sink.events:
            return step
    raise AssertionError("no token")


class Watched(tuple[int, ...]):
    """A prompt that counts how many of its tokens are copied."""

    __slots__ = ()
    copied: ClassVar[int] = 0

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        """Count what a slice copies."""
        part = super().__getitem__(at)
        if isinstance(part, tuple):
            Watched.copied += len(part)
        return part


@pytest.mark.parametrize(
    ("other", "count", "alike", "copied"),
    [
        (tuple(range(1000, 2000)), 900, False, 0),
        (tuple(range(800)), 900, False, 0),
        (tuple(range(1000)), 900, True, 900),
        ((7, *range(1, 1000)), 900, False, 900),
        ((0, 1, 9), 2, True, 2),
    ],
)
def test_prompts_that_differ_are_told_apart_without_copies(
    other: tuple[int, ...], count: int, alike: bool, copied: int
) -> None:
    """Each waiting prompt is held against each being read: of most pairs one token says enough."""
    prompt, Watched.copied = Watched(range(1000)), 0
    assert begin_alike(prompt, other, count) is alike
    assert prompt.copied == copied


def test_waiting_streams_join_by_priority_deadline_and_age(folder: Path, clock: Clock) -> None:
    """With one row: higher priority first, then the earlier deadline, then the older one."""
    tiny = tiny_engine(folder, rows_max=1, clock=clock)
    orders = [(0, None), (0, None), (0, 500.0), (1, None), (-1, 150.0), (0, 400.0), (1, 900.0)]
    sinks = [
        tiny.submit(prompt_of(n, 3), max_tokens=2, priority=priority, deadline_s=deadline_s)[1]
        for n, (priority, deadline_s) in enumerate(orders)
    ]

    assert order_of_first(tiny, sinks) == [6, 3, 5, 2, 0, 1, 4]


def test_a_high_priority_starves_nobody(folder: Path, clock: Clock) -> None:
    """However many of higher priority keep coming, the oldest one's turn comes."""
    tiny = tiny_engine(folder, rows_max=1, clock=clock)
    _, low = tiny.submit(prompt_of(0, 3), max_tokens=1, priority=-9)
    before = 0
    while not low.events:
        tiny.submit(prompt_of(1, 3), max_tokens=1, priority=9)
        tiny.engine.step()
        before += 1

    assert before == OVERTAKES_MAX + 1


def test_a_stream_that_waits_too_long_is_given_up_unevaluated(folder: Path, clock: Clock) -> None:
    """At the first step after its deadline, though its turn would have come with it."""
    tiny = tiny_engine(folder, rows_max=1, clock=clock, prefix_nbytes=AMPLE)
    _, first = tiny.submit(prompt_of(1, 3), max_tokens=3)
    tiny.engine.step()
    _, second = tiny.submit(prompt_of(2, 3), deadline_s=clock.now_s + 5.0)
    clock.now_s += 4.9
    tiny.engine.step()
    assert second.events == []
    clock.now_s += 0.1
    tiny.run()

    (event,) = second.events
    assert isinstance(event, Failed)
    assert isinstance(event.error, DeadlinePassed)
    assert event.error.offset == 0
    assert len(first.ids) == 3
    assert sum(tiny.prefix.counts.lookups.values()) == 1


@pytest.mark.parametrize("length", [3, 400])
def test_a_row_past_its_deadline_is_freed_by_the_next_step(
    folder: Path, clock: Clock, length: int
) -> None:
    """Decoding or in its prefill, whoever cancels or not; its neighbour goes on undisturbed."""
    tiny = tiny_engine(folder, clock=clock)
    _, other = tiny.submit(prompt_of(1, 3), max_tokens=20)
    _, late = tiny.submit(prompt_of(2, length), max_tokens=200, deadline_s=clock.now_s + 1.0)
    for _ in range(5):
        tiny.engine.step()
    got = len(late.ids)
    assert len(tiny.caches.rows) == 2
    clock.now_s += 1.0
    tiny.engine.step()

    assert len(tiny.caches.rows) == 1
    event = late.events[-1]
    assert isinstance(event, Failed)
    assert isinstance(event.error, DeadlinePassed)
    assert event.error.offset == got
    tiny.run()
    assert other.ids == tiny.alone(prompt_of(1, 3), max_tokens=20).ids


@pytest.mark.parametrize("decoding", [False, True])
def test_a_short_prompt_waits_for_no_long_one(
    folder: Path, clock: Clock, *, decoding: bool
) -> None:
    """Beside a long prompt under way it has its first token with the next step."""
    tiny = tiny_engine(folder, clock=clock, chunk=CHUNK)
    if decoding:
        tiny.submit(prompt_of(0, 1), max_tokens=100)
    _, long = tiny.submit(prompt_of(1, 480), max_tokens=1)
    tiny.engine.step()
    _, short = tiny.submit(prompt_of(2, 20), max_tokens=1)

    assert steps_to_first(tiny, short) == 1
    assert long.events == []


def test_a_long_prompt_that_has_waited_goes_before_a_short_one(folder: Path, clock: Clock) -> None:
    """Ten times as long, but waiting for a hundred times as long."""
    tiny = tiny_engine(folder, clock=clock, chunk=CHUNK)
    now_s = clock.now_s
    _, short = tiny.submit(prompt_of(1, 40), max_tokens=1, submitted_s=now_s - 0.1)
    _, long = tiny.submit(prompt_of(2, 6 * CHUNK + 1), max_tokens=1, submitted_s=now_s - 10.0)

    assert order_of_first(tiny, [short, long]) == [1, 0]


def test_short_prompts_do_not_keep_a_long_one_waiting_for_ever(folder: Path, clock: Clock) -> None:
    """A long prompt has every ninth chunk at least, however many short ones come."""
    tiny = tiny_engine(folder, clock=clock, rows_max=2, chunk=CHUNK)
    _, long = tiny.submit(prompt_of(1, 4 * CHUNK + 1), max_tokens=1)
    steps = 0
    while not long.events:
        tiny.submit(prompt_of(2, CHUNK + 1), max_tokens=1)
        tiny.engine.step()
        steps += 1

    assert steps <= 4 * (OVERTAKES_MAX + 1)


def test_short_prompts_share_a_step(folder: Path, clock: Clock) -> None:
    """A burst of short prompts is evaluated together, up to one chunk's tokens a step."""
    tiny = tiny_engine(folder, clock=clock, rows_max=8, chunk=CHUNK)
    sinks = [tiny.submit(prompt_of(n, 17), max_tokens=4)[1] for n in range(8)]
    tiny.engine.step()
    assert [bool(sink.events) for sink in sinks] == [True] * 4 + [False] * 4
    tiny.engine.step()
    assert [bool(sink.events) for sink in sinks] == [True] * (4 + FLOOR // 16) + [False] * 2
    tiny.run()

    lone = [tiny.alone(prompt_of(n, 17), max_tokens=4).ids for n in range(8)]
    assert [sink.ids for sink in sinks] == lone


def test_priority_goes_before_length_in_the_prefill(folder: Path, clock: Clock) -> None:
    """A long prompt of higher priority is evaluated before a short one."""
    tiny = tiny_engine(folder, clock=clock, chunk=CHUNK)
    _, short = tiny.submit(prompt_of(1, 40), max_tokens=1)
    _, long = tiny.submit(prompt_of(2, 3 * CHUNK + 1), max_tokens=1, priority=1)

    assert order_of_first(tiny, [short, long]) == [1, 0]


def test_a_known_prompt_waits_for_no_long_one(folder: Path, clock: Clock) -> None:
    """A long prompt that is known but for a few tokens goes before one of half its length."""
    tiny = tiny_engine(folder, clock=clock, chunk=CHUNK, prefix_nbytes=AMPLE)
    known = prompt_of(1, 400)
    tiny.alone(known, max_tokens=1)
    _, fresh = tiny.submit(prompt_of(2, 200), max_tokens=1)
    tiny.engine.step()
    _, again = tiny.submit((*known, *prompt_of(3, 5)), max_tokens=1)

    assert steps_to_first(tiny, again) == 1
    assert fresh.events == []
    assert again.finished.usage.cached_tokens == 400


def test_prompts_that_begin_alike_wait_for_the_first(folder: Path, clock: Clock) -> None:
    """Where several could go in one step, all but one wait for what they have in common."""
    tiny = tiny_engine(folder, clock=clock, rows_max=4, chunk=512, prefix_nbytes=AMPLE)
    shared = prompt_of(1, 100)
    sinks = [tiny.submit((*shared, *prompt_of(n, 9)), max_tokens=2)[1] for n in range(2, 6)]
    tiny.engine.step()
    assert [bool(sink.events) for sink in sinks] == [True, False, False, False]
    tiny.engine.step()
    assert all(sink.events for sink in sinks)
    tiny.run()

    assert [sink.finished.usage.cached_tokens for sink in sinks] == [0, 100, 100, 100]


def test_a_short_prompt_waits_for_no_long_one_that_begins_alike(folder: Path, clock: Clock) -> None:
    """To wait is only worth it where less is left to evaluate than both have in common."""
    tiny = tiny_engine(folder, clock=clock, chunk=CHUNK, prefix_nbytes=AMPLE)
    shared = prompt_of(1, 70)
    _, long = tiny.submit((*shared, *prompt_of(2, 400)), max_tokens=1)
    tiny.engine.step()
    _, short = tiny.submit((*shared, *prompt_of(3, 3)), max_tokens=1)

    assert steps_to_first(tiny, short) <= 2
    assert long.events == []


class Faulty(int):
    """A number that cannot be compared, as a constraint that cannot say what may follow."""

    def __gt__(self, other: object) -> bool:
        raise ArithmeticError(other)


def test_a_draw_that_cannot_be_made_up_fails_its_row_alone(folder: Path, clock: Clock) -> None:
    """Before anything is dispatched the row is ended; its neighbours take part in the same step."""
    tiny = tiny_engine(folder, clock=clock)
    _, good = tiny.submit(prompt_of(1, 5))
    _, bad = tiny.submit(prompt_of(2, 5), min_tokens=Faulty(0))
    tiny.engine.step()

    (event,) = bad.events
    assert isinstance(event, Failed)
    assert isinstance(event.error, InternalError)
    assert len(good.ids) == 1
    assert len(tiny.caches.rows) == 1
    tiny.run()
    assert good.ids == tiny.alone(prompt_of(1, 5)).ids
    assert not tiny.caches.rows
