"""Questions to children that can be killed: answered, late, fatal, broken off."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from mlxd_shared.config import GIB
from mlxd_worker.killable.framing import write_message
from mlxd_worker.killable.pool import Died, Late, Pool, Stop, Stopped

LONG_S = 60.0
"""More than any answer here takes."""
TOO_MUCH = 1 << 62 if sys.platform == "darwin" else 2 * GIB  # there nothing bounds address space


def command(*, limit_s: float = LONG_S, memory_nbytes_max: int = GIB) -> tuple[str, ...]:
    """Return what starts a child with these bounds of its own."""
    path = Path(__file__).with_name("child.py")
    return (sys.executable, str(path), str(limit_s), str(memory_nbytes_max))


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(command())
    yield made
    made.close()


def asked(pool: Pool, question: bytes) -> bytes:
    return pool.ask(question, limit_s=LONG_S)


def pid(pool: Pool) -> int:
    """Return whose turn it is."""
    return int(asked(pool, b"pid"))


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
        assert asked(pool, b"say " + text) == text
    assert pid(pool) == first


def test_a_late_child_is_killed_and_the_next_question_is_served(pool: Pool) -> None:
    """The time is the question's: whoever asks next has a fresh child and all of its own."""
    first = pid(pool)
    with pytest.raises(Late):
        pool.ask(b"hang", limit_s=0.1)
    assert is_gone(first)
    assert asked(pool, b"say hello") == b"hello"


@pytest.mark.parametrize("question", [b"die", b"half", b"fill %d" % TOO_MUCH])
def test_a_question_that_ends_its_child_is_told_apart(pool: Pool, question: bytes) -> None:
    """Killed, gone in the middle of an answer, or beyond its memory: no answer, and not late."""
    with pytest.raises(Died):
        asked(pool, question)
    assert asked(pool, b"say hello") == b"hello"


def test_a_child_that_died_idle_does_not_refuse_the_next_question(pool: Pool) -> None:
    """What befell a child between two questions is not held against the second."""
    first = pid(pool)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)

    assert asked(pool, b"say hello") == b"hello"


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
            asked(pool, b"interrupt")
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert is_gone(first)
    assert asked(pool, b"say hello") == b"hello"


@pytest.mark.asyncio
async def test_who_leaves_a_thread_that_asks_stops_nothing(pool: Pool, tmp_path: Path) -> None:
    """A cancelled task's question goes on; its answer goes nowhere, and its child is kept."""
    path = tmp_path / "answer"
    os.mkfifo(path)
    first = pid(pool)
    asking = asyncio.get_running_loop().run_in_executor(None, asked, pool, b"read " + bytes(path))
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
async def test_close_ends_children_idle_and_asked(pool: Pool, tmp_path: Path) -> None:
    """Those that wait end at once, one that is asked with its answer; none comes back."""
    path = tmp_path / "answer"
    os.mkfifo(path)
    busy = pid(pool)
    asking = asyncio.get_running_loop().run_in_executor(None, asked, pool, b"read " + bytes(path))
    writing = await asyncio.to_thread(path.open, "wb")
    idle = pid(pool)

    pool.close()
    assert is_gone(idle)
    assert not is_gone(busy)

    writing.write(b"said")
    writing.close()
    assert await asking == b"said"
    assert is_gone(busy)


def test_a_child_bounds_its_own_time() -> None:
    """With nobody's clock but its own, a child ends within a second of its limit."""
    pool = Pool(command(limit_s=0))
    with pytest.raises(Died):
        asked(pool, b"hang")


def test_a_child_ends_with_its_input() -> None:
    """A worker that is gone closes the pipe, whatever happened to it: its children end well."""
    child = subprocess.Popen(command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    write_message(child.stdin, b"say hello")
    said, _ = child.communicate(timeout=LONG_S)

    assert said == b"5\nhello"
    assert child.returncode == 0


def test_every_child_is_told_first_what_all_are_told() -> None:
    """Once, before its first question, and again where another has to be started."""
    pool = Pool(command(), first=b"say first", first_s=LONG_S)
    late = Pool(command(), first=b"hang", first_s=0.1)
    try:
        first = pid(pool)
        assert pid(pool) == first
        pool.rest()
        assert is_gone(first)
        assert asked(pool, b"say hello") == b"hello"
        with pytest.raises(Late):
            asked(late, b"say hello")
    finally:
        pool.close()
        late.close()


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
