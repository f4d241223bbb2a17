"""A loop whose clock follows a script: nothing sleeps, and what time decides is decided exactly.

Not for work on threads, which takes none of this time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
GAP_S = 1000.0


class Script(selectors.DefaultSelector):
    """Time goes on by what the loop would wait for, or by a gap in its place; nothing sleeps."""

    def __init__(self) -> None:
        """Begin at 0 s, with no gaps."""
        super().__init__()
        self.now_s = 0.0
        self.pauses = 0
        self.is_gap: Callable[[int], bool] = lambda _: False
        self.acts: dict[int, Callable[[], object]] = {}
        """What happens in which pause."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now, after a pause by the script."""
        if timeout is None or timeout > 0:
            self.pauses += 1
            self.now_s += GAP_S if self.is_gap(self.pauses) else timeout or GAP_S
            self.acts.pop(self.pauses, lambda: None)()
        return super().select(0)


class ScriptedLoop(asyncio.SelectorEventLoop):
    """A real loop with that clock."""

    def __init__(self, script: Script) -> None:
        """Take the script."""
        self._script = script
        super().__init__(script)

    def time(self) -> float:
        """Return the scripted time."""
        return self._script.now_s


def run(script: Script, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run `work` to its end by the script."""
    with asyncio.Runner(loop_factory=lambda: ScriptedLoop(script)) as runner:
        return runner.run(work())
