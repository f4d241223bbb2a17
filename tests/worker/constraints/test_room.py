"""Streams wait for their formats within bounds, and a format is compiled once for all of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mlxd_shared.domain.errors import InvalidRequest, QueueFull, ShuttingDown
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.constraints.room import CompileRoom
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Stop
from tests.support.busy_threads import busy_threads
from tests.support.constrained import demo_tokenizer


class HeldTrials(Pool):
    """Trials that end when told, and count what they were given."""

    def __init__(self) -> None:
        super().__init__(())
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.sources: list[bytes] = []

    def ask(self, question: bytes, *, limit_s: float, stop: Stop | None = None) -> bytes:
        """Wait to be told."""
        self.sources.append(question)
        self.begun.release()
        assert self.go.wait(60)
        return b""


def one(text: str) -> ResponseFormat:
    """Return a format of one text, which is tried out like every expression."""
    return ResponseFormat(FormatKind.REGEX, text)


def fresh() -> Constraints:
    """Return constraints that keep nothing yet."""
    return Constraints(demo_tokenizer(), demo_tokenizer().vocab_size)


@pytest.mark.asyncio
async def test_a_format_is_compiled_once_for_all_who_ask() -> None:
    """Streams that ask for the same format share one compilation; later ones find it kept."""
    trials, constraints = HeldTrials(), fresh()
    room = CompileRoom(trials=trials)
    asking = [asyncio.create_task(room.compile(constraints, one("a"))) for _ in range(5)]
    await asyncio.to_thread(trials.begun.acquire)
    trials.go.set()
    constraints_made = await asyncio.gather(*asking)

    assert len(trials.sources) == 1
    assert len(set(map(id, constraints_made))) == 1
    assert await room.compile(constraints, one("a")) is constraints_made[0]


@pytest.mark.asyncio
async def test_a_format_waits_for_no_other_work_on_threads() -> None:
    """The event loop's own threads may all be at work: a compilation has one of its own."""
    trials = HeldTrials()
    trials.go.set()
    async with busy_threads():
        assert await CompileRoom(trials=trials).compile(fresh(), one("a"))


@pytest.mark.asyncio
async def test_compilations_and_those_who_wait_are_bounded() -> None:
    """So many at once, so many more in line, and no others; a client that leaves stops nothing."""
    trials, constraints = HeldTrials(), fresh()
    room = CompileRoom(compiles_max=2, waiting_max=1, trials=trials)
    asking = [asyncio.create_task(room.compile(constraints, one(t))) for t in "abc"]
    for _ in range(2):
        await asyncio.to_thread(trials.begun.acquire)
    assert len(trials.sources) == 2
    with pytest.raises(QueueFull, match="response formats to compile"):
        await room.compile(constraints, one("d"))
    asking[0].cancel()
    trials.go.set()
    await asyncio.gather(*asking[1:])

    assert len(trials.sources) == 3
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    assert constraints.find_kept(one("a")) or await room.compile(constraints, one("a"))


@pytest.mark.asyncio
async def test_nobody_waits_longer_than_the_bound() -> None:
    """A stream gives up in time; what it has begun goes on, and is there for the next one."""
    trials, constraints = HeldTrials(), fresh()
    room = CompileRoom(wait_s=0.05, trials=trials)
    with pytest.raises(InvalidRequest) as caught:
        await room.compile(constraints, one("a"))
    assert caught.value.violations[0].field == "response_format.regex"
    trials.go.set()
    patient = CompileRoom(trials=trials)

    assert await patient.compile(constraints, one("a"))


@pytest.mark.asyncio
async def test_a_bad_format_is_told_to_each_who_asks() -> None:
    """The error reaches everybody, and nothing is kept of it."""
    constraints, room = fresh(), CompileRoom(trials=HeldTrials())
    bad = ResponseFormat(FormatKind.REGEX, "(")
    results = await asyncio.gather(
        *(room.compile(constraints, bad) for _ in range(3)), return_exceptions=True
    )

    assert [type(result) for result in results] == [InvalidRequest] * 3
    assert constraints.find_kept(bad) is None


@pytest.mark.asyncio
async def test_nothing_is_compiled_in_a_room_that_is_closed() -> None:
    """Whoever asks then, or still waits for a turn, is told that the worker stops."""
    trials, constraints = HeldTrials(), fresh()
    room = CompileRoom(compiles_max=1, trials=trials)
    under_way = asyncio.create_task(room.compile(constraints, one("a")))
    await asyncio.to_thread(trials.begun.acquire)
    waiting = asyncio.create_task(room.compile(constraints, one("b")))
    await room.close()
    trials.go.set()

    with pytest.raises(ShuttingDown):
        await waiting
    with pytest.raises(ShuttingDown):
        await room.compile(constraints, one("c"))
    await under_way
    assert len(trials.sources) == 1
