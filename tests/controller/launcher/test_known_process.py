"""Processes that are not ours, known by id and start: never another one, never a reused id."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mlxd_shared.ops.known_process import KnownProcess, ProcessMark, mark_of

LIMIT_S = 60.0
NO_PID = (1 << 22) + 1
"""Above what Linux gives at most."""


@asynccontextmanager
async def bystander() -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that does nothing until it is ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_a_mark_stays_the_same_and_is_nobody_elses() -> None:
    """Asked twice it is equal; of no process, or of a group's or no id, there is none."""
    mine = mark_of(os.getpid())
    assert mine is not None
    assert mark_of(os.getpid()) == mine
    parent = mark_of(os.getppid())
    assert parent is not None
    assert parent.start != mine.start or parent.pid != mine.pid
    assert [mark_of(pid) for pid in (NO_PID, 0, -1)] == [None, None, None]


@pytest.mark.asyncio
async def test_an_id_that_means_another_process_now_is_refused() -> None:
    """A mark whose start is another's: no hold is taken, and nobody is signalled."""
    async with bystander() as process:
        for mark in (ProcessMark(process.pid, "another"), ProcessMark(NO_PID, "x")):
            with pytest.raises(ProcessLookupError):
                KnownProcess(mark)
        assert process.returncode is None


@pytest.mark.asyncio
async def test_its_end_is_told_once_and_a_signal_reaches_it() -> None:
    """A signal ends it, the watcher hears of that; later signals go to nobody."""
    async with bystander() as process:
        mark = mark_of(process.pid)
        assert mark is not None
        known, ended = KnownProcess(mark), asyncio.Event()
        known.watch(ended.set)
        assert known.alive
        known.send_signal(signal.SIGTERM)
        await asyncio.wait_for(ended.wait(), LIMIT_S)
        assert not known.alive  # a zombie until it is reaped, and ended all the same
        known.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGTERM
        known.close()


@pytest.mark.asyncio
async def test_one_that_is_let_go_of_is_watched_no_more() -> None:
    """After close() nothing is told."""
    async with bystander() as process:
        mark = mark_of(process.pid)
        assert mark is not None
        known, ended = KnownProcess(mark), asyncio.Event()
        known.watch(ended.set)
        known.close()
        process.kill()
        await process.wait()
        assert not ended.is_set()
