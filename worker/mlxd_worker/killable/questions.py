"""What may become of a question that a child is asked, and who may end it.

Invariants:
- A child is killed for one question alone, while it is asked that: whoever comes to kill it later
  does nothing.
"""

from __future__ import annotations

import subprocess
import threading


class NoAnswer(Exception):
    """A question that no child has answered; the caller decides what that means."""


class Late(NoAnswer):
    """It took too long, and its child was killed."""


class Died(NoAnswer):
    """Its child ended instead, most often for want of memory or of stack."""


class Stopped(NoAnswer):
    """Whoever asked wants no answer any more."""


class Closed(NoAnswer):
    """The pool is closed."""


class Unready(NoAnswer):
    """No child could do what each is told first: that is not the question's fault."""

    def __init__(self, *, is_late: bool) -> None:
        """Tell whether it took too long; else the child ended."""
        super().__init__()
        self.is_late = is_late


class Stop:
    """Ends a question that another thread asks, begun or not. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_set = False

    def set(self) -> None:
        """Kill the child that looks for the answer; let none begin."""
        with self._lock:
            self._is_set = True
            if self._child is not None:
                self._child.kill()

    def check(self) -> None:
        """Raise Stopped if it is set."""
        with self._lock:
            if self._is_set:
                raise Stopped

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Know whom to kill; raises Stopped if it is set already."""
        with self._lock:
            if self._is_set:
                raise Stopped
            self._child = child

    def forget(self) -> None:
        """Kill nobody from here on."""
        with self._lock:
            self._child = None


class Turn:
    """A child's time with one question. Any thread."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._lock = threading.Lock()
        self._child = child
        self._is_over = False
        self.is_late = False
        """Whether the child was killed for being late."""

    def end_late(self) -> None:
        """Kill the child, unless it is done: a timer may come late itself."""
        with self._lock:
            if not self._is_over:
                self.is_late = True
                self._child.kill()

    def finish(self) -> None:
        """Let nobody kill the child for this question any more."""
        with self._lock:
            self._is_over = True
