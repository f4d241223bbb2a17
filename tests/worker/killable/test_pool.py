"""Questions to children that can be killed: answered, late, fatal, broken off."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import ClassVar

import pytest

from mlxd_shared.config import GIB
from mlxd_worker.killable.pool import First, Pool
from mlxd_worker.killable.process import write_message
from mlxd_worker.killable.questions import Closed, Died, Late, Stop, Stopped, Unready

Check = Callable[[bytes], object]
LONG_S = 60.0
"""More than any answer here takes."""
TOO_MUCH = 1 << 62 if sys.platform == "darwin" else 2 * GIB  # there nothing bounds address space


def command(*, limit_s: float = LONG_S, memory_nbytes_max: int = GIB) -> tuple[str, ...]:
    """Return what starts a child with these bounds of its own."""
    path = Path(__file__).with_name("child.py")
    return (sys.executable, str(path), str(limit_s), str(memory_nbytes_max))


@pytest.fixture
def pool() -> Iterator[Pool]:
    child_pool = Pool(command())
    yield child_pool
    child_pool.close()


def ask(pool: Pool, question: bytes) -> bytes:
    return pool.ask(question, limit_s=LONG_S)


def pid(pool: Pool) -> int:
    """Return whose turn it is."""
    return int(ask(pool, b"pid"))


def is_gone(process_id: int) -> bool:
    """Tell whether a process has ended and was seen off."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_answers_are_bytes_and_a_child_is_asked_again(pool: Pool) -> None:
    """Whatever bytes a question has, so has its answer; one child answers one after another."""
    first = pid(pool)
    for text in (b"", b"\n", b"3\nabc", bytes(range(256)) * 1000):
        assert ask(pool, b"say " + text) == text
    assert pid(pool) == first


def test_a_late_child_is_killed_and_the_next_question_is_served(pool: Pool) -> None:
    """The time is the question's: whoever asks next has a fresh child and all of its own."""
    first = pid(pool)
    with pytest.raises(Late):
        pool.ask(b"hang", limit_s=0.1)
    assert is_gone(first)
    assert ask(pool, b"say hello") == b"hello"


@pytest.mark.parametrize("question", [b"die", b"half", b"fill %d" % TOO_MUCH])
def test_a_question_that_ends_its_child_is_told_apart(pool: Pool, question: bytes) -> None:
    """Killed, gone in the middle of an answer, or beyond its memory: no answer, and not late."""
    with pytest.raises(Died):
        ask(pool, question)
    assert ask(pool, b"say hello") == b"hello"


def test_a_child_that_died_idle_does_not_refuse_the_next_question(pool: Pool) -> None:
    """What befell a child between two questions is not held against the second."""
    first = pid(pool)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)

    assert ask(pool, b"say hello") == b"hello"


def test_a_question_that_is_broken_off_ends_its_child(pool: Pool) -> None:
    """An interrupt while it waits: the answer, were it to come, would be the next one's."""

    class Interrupted(Exception):
        """Ours."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    first = pid(pool)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            ask(pool, b"interrupt")
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert is_gone(first)
    assert ask(pool, b"say hello") == b"hello"


@pytest.mark.asyncio
async def test_who_leaves_a_thread_that_asks_stops_nothing(pool: Pool, tmp_path: Path) -> None:
    """A cancelled task's question goes on; its answer goes nowhere, and its child is kept."""
    path = tmp_path / "answer"
    os.mkfifo(path)
    first = pid(pool)
    asking = asyncio.get_running_loop().run_in_executor(None, ask, pool, b"read " + bytes(path))
    task = asyncio.ensure_future(asyncio.shield(asking))
    writing = await asyncio.to_thread(path.open, "wb")  # opens once the child reads
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    second = pid(pool)
    writing.close()

    assert await asking == b""
    assert second != first
    assert pid(pool) == first


@pytest.mark.asyncio
async def test_close_ends_children_idle_and_asked_and_starts_none(
    pool: Pool, tmp_path: Path
) -> None:
    """All are gone once it returns; whoever asked one is told why, and so is whoever asks later."""
    path = tmp_path / "answer"
    os.mkfifo(path)
    busy = pid(pool)
    asking = asyncio.get_running_loop().run_in_executor(None, ask, pool, b"read " + bytes(path))
    writing = await asyncio.to_thread(path.open, "wb")
    idle = pid(pool)

    pool.close()
    assert is_gone(idle)
    assert is_gone(busy)
    writing.close()
    with pytest.raises(Closed):
        await asking
    with pytest.raises(Closed):
        pid(pool)


class LateTimer(threading.Timer):
    """One that goes off all the same when it is cancelled, and again when it is let."""

    instances: ClassVar[list[LateTimer]] = []

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        super().__init__(interval, function)
        self.instances.append(self)

    def cancel(self) -> None:
        """Go off first, as one does that has begun to."""
        self.function()
        super().cancel()


def test_a_timer_that_comes_late_kills_nobody() -> None:
    """Its question is answered: the child is another's by then, who waits for its own answer."""
    LateTimer.instances.clear()
    pool = Pool(command(), timer=LateTimer)
    try:
        first = pid(pool)
        LateTimer.instances[0].function()
        assert pid(pool) == first
    finally:
        pool.close()


def test_a_child_that_is_killed_as_it_answers_is_asked_nothing_more(tmp_path: Path) -> None:
    """Its answer is whole, and still it is gone, be it seen or not: the next one has another."""
    LateTimer.instances.clear()
    pool, path = Pool(command(), timer=LateTimer), tmp_path / "answer"
    os.mkfifo(path)
    first = pid(pool)

    def answer() -> None:
        with path.open("wb"):  # the child reads it, so the question's timer runs
            LateTimer.instances[-1].function()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(Late):
            ask(pool, b"read " + bytes(path))
        assert is_gone(first)
        assert pid(pool) != first
    finally:
        thread.join()
        pool.close()


def test_a_timer_that_cannot_be_started_leaves_no_child() -> None:
    """No thread for it: the question fails, and its child is ended."""

    class Refused(LateTimer):
        """As where there is no thread left."""

        def start(self) -> None:
            """Fail."""
            raise RuntimeError

    pool = Pool(command(), timer=Refused)
    with pytest.raises(RuntimeError):
        pid(pool)
    assert not pool._children
    pool.close()


def test_a_child_bounds_its_own_time() -> None:
    """With nobody's clock but its own, a child ends within a second of its limit."""
    pool = Pool(command(limit_s=0))
    with pytest.raises(Died):
        ask(pool, b"hang")


def test_a_child_ends_with_its_input() -> None:
    """A worker that is gone closes the pipe, whatever happened to it: its children end well."""
    child = subprocess.Popen(command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    write_message(child.stdin, b"say hello")
    said, _ = child.communicate(timeout=LONG_S)

    assert said == b"5\nhello"
    assert child.returncode == 0


def first(question: bytes, *, limit_s: float = LONG_S, check: Check = bytes) -> First:
    return First(lambda: question, limit_s, check)


def test_every_child_is_told_first_what_all_are_told() -> None:
    """Once, before its first question, and again where another has to be started."""
    heard: list[bytes] = []
    pool = Pool(command(), first=first(b"say first", check=heard.append))
    try:
        child = pid(pool)
        assert pid(pool) == child
        assert heard == [b"first"]
        pool.rest()
        assert is_gone(child)
        assert ask(pool, b"say hello") == b"hello"
        assert heard == [b"first"] * 2
    finally:
        pool.close()


@pytest.mark.parametrize(("question", "is_late"), [(b"hang", True), (b"die", False)])
def test_what_befalls_a_child_at_first_is_not_the_questions(
    question: bytes, *, is_late: bool
) -> None:
    """Late or dead before it was asked anything is an error of its own; no child remains."""
    limit_s = 0.1 if is_late else LONG_S
    pool = Pool(command(), first=first(question, limit_s=limit_s))
    with pytest.raises(Unready) as caught:
        ask(pool, b"say hello")
    assert caught.value.is_late == is_late
    assert not pool._children
    pool.close()


def test_a_child_whose_first_answer_will_not_do_is_ended() -> None:
    """With the error of whoever checks it; nothing else is asked of it."""

    class UselessError(Exception):
        """Ours."""

    def refuse(answer: bytes) -> None:
        raise UselessError(answer)

    pool = Pool(command(), first=first(b"say first", check=refuse))
    with pytest.raises(UselessError):
        ask(pool, b"die")
    assert not pool._children
    pool.close()


def test_a_question_that_is_stopped_ends_its_child_or_never_begins(
    pool: Pool, tmp_path: Path
) -> None:
    """Another thread says so; a question that was answered meanwhile is left alone."""
    stop, path = Stop(), tmp_path / "pipe"
    first = pid(pool)
    os.mkfifo(path)

    def end() -> None:
        with path.open("wb"):  # it is reading: the question has begun
            stop.set()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(Stopped):
        pool.ask(b"read " + str(path).encode(), limit_s=LONG_S, stop=stop)
    thread.join()
    assert is_gone(first)
    with pytest.raises(Stopped):
        pool.ask(b"say hello", limit_s=LONG_S, stop=stop)

    later = Stop()
    second = int(pool.ask(b"pid", limit_s=LONG_S, stop=later))
    later.set()
    assert pid(pool) == second
