"""Waits by time in which this process could hear: on a loop whose clock follows a script."""

from __future__ import annotations

import asyncio
import math

import pytest

from mlxd_controller.runtime.hearing import SLICE_S, hear
from tests.support.scripted_loops import GAP_S, Script, run

LIMIT_S = 10.0


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
