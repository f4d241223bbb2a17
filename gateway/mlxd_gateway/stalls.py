"""When a client takes nothing of its answer: a watch over what is left to send.

Invariants:
- Progress is any byte that has gone: a slow reader is never cut off, one that stands still is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is yet to come."""

    def cancel(self) -> None:
        """Have it not come."""


class StallWatch:
    """Over one connection: paused while the system takes no more of what is written."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], Timer],
        left_nbytes: Callable[[], int],
        end: Callable[[], None],
        *,
        limit_s: float,
    ) -> None:
        """Call `end` where nothing has gone for `limit_s`. left_nbytes: what is left to send."""
        self._call_later = call_later
        self._left_nbytes = left_nbytes
        self._end = end
        self._limit_s = limit_s
        self._timer: Timer | None = None
        self._last_nbytes = 0

    def begin(self) -> None:
        """Watch: writing is paused from now on."""
        self.stop()
        self._last_nbytes = self._left_nbytes()
        self._timer = self._call_later(self._limit_s, self._look)

    def stop(self) -> None:
        """Watch no longer: writing goes on, or the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._left_nbytes() < self._last_nbytes:
            self.begin()
        else:
            self._end()
