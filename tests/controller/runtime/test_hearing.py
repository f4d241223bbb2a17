"""Waits by time in which this process could hear: on a loop whose clock follows a script."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from mlxd_controller.runtime.hearing import SLICE_S, hear

_T = TypeVar("_T")
LIMIT_S = 10.0
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


def test_who_says_nothing_is_given_up_in_time() -> None:
    """After the limit, no sooner and no later where nothing stands still; and it is cancelled."""
    script = Script()

    async def work() -> None:
        answer = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await hear(answer, limit_s=LIMIT_S)
        assert answer.cancelled()

    run(script, work)
    assert script.now_s == LIMIT_S


@pytest.mark.parametrize("pause", [1, 5, 10])
def test_what_came_while_this_process_stood_still_is_heard(pause: int) -> None:
    """However long that was, and whenever: it is looked at once more before anyone is judged."""
    script = Script()
    script.is_gap = lambda number: number == pause

    async def work() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        script.acts[pause + 1] = lambda: answer.set_result("here")
        return await hear(answer, limit_s=LIMIT_S)

    assert run(script, work) == "here"
    assert script.now_s > GAP_S > LIMIT_S


def test_time_that_was_heard_counts_between_gaps() -> None:
    """Who says nothing in all of it is given up, though every other pause stands still."""
    script = Script()
    script.is_gap = lambda number: number % 2 == 1

    async def work() -> None:
        with pytest.raises(TimeoutError):
            await hear(asyncio.get_running_loop().create_future(), limit_s=LIMIT_S)

    run(script, work)
    assert script.pauses == 2 * LIMIT_S / SLICE_S


def test_without_a_limit_nobody_is_given_up() -> None:
    """math.inf waits for ever; an error is raised as it is."""
    script = Script()

    async def work() -> None:
        answer = asyncio.get_running_loop().create_future()
        script.acts[100] = lambda: answer.set_exception(ValueError("late"))
        for pause in range(1, 100):  # each wakes the loop, and is no answer
            asyncio.get_running_loop().call_later(pause, int)
        with pytest.raises(ValueError, match="late"):
            await hear(answer, limit_s=math.inf)

    run(script, work)
    assert script.pauses == 100
