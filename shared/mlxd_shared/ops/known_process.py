"""A process that is not our child, known by its id and a mark of its start: watched and signalled.

Invariants:
- A later process of the same id is never taken for it. Where the system has process handles, ours
  is opened first and the mark compared afterwards: from then on it means that process, or none.
- A zombie has ended: it is only not reaped yet, which is not ours to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlxd_shared import config

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE_FIELD, _START_FIELD = 0, 19
"""Of /proc/PID/stat, counted after the name in parentheses."""
_ENDED_STATES = (b"Z", b"X")


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process, now and for ever. `start` is opaque: equal marks are the same process."""

    pid: int
    start: str


def mark_of(pid: int) -> ProcessMark | None:
    """Return the mark of the process that has this id now; None if there is none.

    It does not change with the clock, and is another after a restart of the machine.
    """
    if pid <= 0:
        return None
    start = _start_on_linux(pid) if sys.platform == "linux" else _start(pid)
    return None if start is None else ProcessMark(pid, start)


def _start_on_linux(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()
    if fields[_STATE_FIELD] in _ENDED_STATES:
        return None
    return f"{_BOOT_ID.read_text().strip()}:{fields[_START_FIELD].decode()}"


def _start(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return repr(process.create_time())
    except psutil.NoSuchProcess:
        return None


class KnownProcess:
    """A living process; close() it at the end. Methods are for the event loop's thread."""

    def __init__(self, mark: ProcessMark) -> None:
        """Take hold of the process.

        Raises:
            ProcessLookupError: it has ended, whoever has its id now.
        """
        self.mark = mark
        self._handle = open_handle(mark.pid)
        self._watch: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if not self.alive:
            self.close()
            raise ProcessLookupError(mark.pid)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return mark_of(self.mark.pid) == self.mark

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it, and to no other; one that has ended takes none."""
        if not self.alive:
            return
        try:
            if sys.platform == "linux" and self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self.mark.pid, number)
        except ProcessLookupError:
            return  # it ended after the look

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` once, on the event loop, when it has ended, unless closed before."""
        assert self._loop is None, "watched already"
        self._loop = asyncio.get_running_loop()
        if self._handle is not None:
            self._loop.add_reader(self._handle, self._end, ended)
        else:
            self._look(ended)

    def close(self) -> None:
        """Let go of it; idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        if self._handle is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._handle)
            os.close(self._handle)
        self._loop, self._watch, self._handle = None, None, None

    def _look(self, ended: Callable[[], None]) -> None:
        assert self._loop is not None
        if self.alive:
            self._watch = self._loop.call_later(config.PARENT_POLL_S, self._look, ended)
        else:
            self._end(ended)

    def _end(self, ended: Callable[[], None]) -> None:
        self.close()
        ended()


def open_handle(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if unsupported.

    Raises:
        ProcessLookupError: there is no such process.
    """
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, or a sandbox: the caller looks for its end instead
        return None
