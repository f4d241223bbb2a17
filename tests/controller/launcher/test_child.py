"""Child processes: their ends, and starts that are cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from mlxd_controller.launcher import child
from mlxd_controller.launcher.child import Child

SLEEP = (sys.executable, "-c", "input()")
"""Lives until its input ends: for processes that get a pipe."""
PAUSE = (sys.executable, "-c", "import signal; signal.pause()")
"""Lives until a signal ends it, also without input."""


def sleeper() -> subprocess.Popen[bytes]:
    """Return a process that lives."""
    return subprocess.Popen(SLEEP, stdin=subprocess.PIPE)


@pytest.mark.asyncio
@pytest.mark.parametrize("by_handle", [True, False])
async def test_an_end_is_seen_once_by_everybody(*, by_handle: bool) -> None:
    """With a handle of the system's or without: the signal that ended it, and it is reaped."""
    process = sleeper()
    known = Child(process, handle=os.pidfd_open(process.pid) if by_handle else None)
    waiting = [asyncio.create_task(known.wait()) for _ in range(3)]
    assert known.pid == process.pid
    known.send_signal(signal.SIGTERM)

    assert await asyncio.gather(*waiting) == [-signal.SIGTERM] * 3
    assert await known.wait() == -signal.SIGTERM
    assert not psutil.pid_exists(process.pid)
    known.send_signal(signal.SIGKILL)  # to nobody
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.asyncio
async def test_a_waiter_that_leaves_takes_nothing_along() -> None:
    """The end is there for those who ask later."""
    process = sleeper()
    known = Child(process, handle=os.pidfd_open(process.pid))
    waiting = asyncio.create_task(known.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    assert await known.wait() == 0


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    """However often it is cancelled, its descriptors are in use until the process is there."""
    before = set(psutil.Process().children())
    read_fd, write_fd = os.pipe()
    starting = asyncio.create_task(
        child.start(PAUSE, output=write_fd, pass_fds=(), environment=os.environ)
    )
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert set(psutil.Process().children()) <= before
    os.close(write_fd)
    assert os.read(read_fd, 1) == b"", "nobody holds the other end"
    os.close(read_fd)


@pytest.mark.asyncio
async def test_a_program_that_is_not_there_is_an_error() -> None:
    """As the system has it."""
    with pytest.raises(FileNotFoundError):
        await child.start(("/no/such",), output=1, pass_fds=(), environment={})
