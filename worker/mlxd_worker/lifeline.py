"""Notices that the controller is gone: its end of a pipe closes, or it is not the parent any more.

Invariants:
- The system closes the pipe whatever way the controller dies; the parent's pid is the second check,
  for a pipe end that leaked into another process.
- `lost` is called at most once, on the event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from mlxd_shared import config

_READ_BYTES = 4096


class Lifeline:
    """Watches the read end of a pipe whose write end only the controller holds."""

    def __init__(self, fd: int, *, lost: Callable[[], None]) -> None:
        """Start watching; inside the event loop. Takes `fd` over."""
        self._fd = fd
        self._lost: Callable[[], None] | None = lost
        self._parent = os.getppid()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)
        self._poll = self._loop.call_later(config.PARENT_POLL_S, self._check_parent)

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._lost is not None:
            self._lost = None
            self._loop.remove_reader(self._fd)
            self._poll.cancel()
            os.close(self._fd)

    def _readable(self) -> None:
        try:
            ended = not os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if ended:
            self._end()

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:
            self._end()
        else:
            self._poll = self._loop.call_later(config.PARENT_POLL_S, self._check_parent)

    def _end(self) -> None:
        lost = self._lost
        self.close()
        if lost is not None:
            lost()
