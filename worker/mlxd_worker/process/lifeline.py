"""Follows the worker's controller, gives another one time to come, and writes to that one's pipe.

Invariants:
- One controller at a time. The first is the parent: the system closes its end of a pipe whatever
  way it dies, and the parent's pid is the second check, for a pipe end that leaked into another
  process. A later one is a process known by its mark.
- For each controller `lost` is called at most once, and `over` at most once in all: when no other
  has come within the grace that `lost` returned. All on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.known_process import KnownProcess, ProcessMark

OUTPUT_FDS = (1, 2)
_READ_BYTES = 4096


class Lifeline:
    """Begins with the read end of a pipe whose write end only the controller holds."""

    def __init__(self, fd: int, *, lost: Callable[[], float], over: Callable[[], None]) -> None:
        """Start following; inside the event loop. Takes `fd` over.

        lost: called when the controller is gone; returns the seconds to wait for another.
        """
        self._fd: int | None = fd
        self._lost = lost
        self._over = over
        self._parent = os.getppid()
        self._later: KnownProcess | None = None
        self._loop = asyncio.get_running_loop()
        self._grace: asyncio.TimerHandle | None = None
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._look)
        self._poll = self._loop.call_later(config.PARENT_POLL_S, self._poll_parent)

    def follow(self, mark: ProcessMark) -> None:
        """Follow this controller from now on; the same one again is no change.

        Raises:
            InvalidRequest: it has ended, or the one that is followed lives.
        """
        if self._later is not None and self._later.mark == mark and self._later.alive:
            return
        try:
            controller = KnownProcess(mark)
        except ProcessLookupError:
            message = f"process {mark.pid} is not the one that is meant"
            raise InvalidRequest.of("controller_pid", message) from None
        self._look()  # its end may have been missed until now
        if self._fd is not None or self._later is not None:
            controller.close()
            raise InvalidRequest.of("controller_pid", "the controller that is followed lives")
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self._later = controller
        controller.watch(self._end)

    def close(self) -> None:
        """Stop following; idempotent."""
        self._let_go()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _let_go(self) -> None:
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            self._poll.cancel()
            os.close(self._fd)
            self._fd = None
        if self._later is not None:
            self._later.close()
            self._later = None

    def _look(self) -> None:
        """Notice the end of the controller, if it has ended."""
        if self._fd is not None:
            ended = os.getppid() != self._parent or _at_end(self._fd)
        else:
            ended = self._later is not None and not self._later.alive
        if ended:
            self._end()

    def _poll_parent(self) -> None:
        self._look()
        if self._fd is not None:
            self._poll = self._loop.call_later(config.PARENT_POLL_S, self._poll_parent)

    def _end(self) -> None:
        self._let_go()
        self._grace = self._loop.call_later(self._lost(), self._over)


def _at_end(fd: int) -> bool:
    """Return whether the other end of a pipe is closed; what was written to it is dropped."""
    try:
        return not os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return False


@contextmanager
def new_output(path: str) -> Iterator[None]:
    """Open the named pipe `path`; when the body has succeeded, stdout and stderr go into it.

    An empty path changes nothing.

    Raises:
        InvalidRequest: it is not a named pipe of this user, or nobody reads from it.
    """
    if not path:
        yield
        return
    fd = _open(path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
            raise InvalidRequest.of("output_path", f"{path} is not a named pipe of this user")
        yield
        os.set_blocking(fd, True)  # as a pipe that is inherited: what is written is not lost
        for output in OUTPUT_FDS:
            os.dup2(fd, output)
    finally:
        os.close(fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InvalidRequest.of("output_path", f"{path}: {error}") from error
