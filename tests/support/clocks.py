"""Time as a test wants it: it stands still unless the test moves it, or goes on with each look.

For what takes a clock as a function that returns seconds; `tests/fakes/world.py` has the
controller's, which tells two times.
"""

from __future__ import annotations


class Clock:
    """Time that a test moves by setting `now_s`."""

    def __init__(self, now_s: float = 100.0, *, tick_s: float = 0.0) -> None:
        """Begin at `now_s`; whoever looks at it moves it by `tick_s` first."""
        self.now_s = now_s
        self._tick_s = tick_s

    def __call__(self) -> float:
        """Return the time."""
        self.now_s += self._tick_s
        return self.now_s
