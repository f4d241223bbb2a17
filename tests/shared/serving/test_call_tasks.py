"""Calls that are reset: their tasks end, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from mlxd_shared.serving.call_tasks import CallTask, spare_batches
from tests.support.turns import turn_until

KEPT_NBYTES_MAX = 40.0
"""Of a call that is reset; a batch's operation alone takes 80."""


def kept_nbytes(*arguments: str) -> float:
    """Reset calls in a process of their own: what neighbours free would count as well."""
    command = [sys.executable, "-m", "tests.support.attacks.kept_of_resets", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc what it has handed out")
def test_calls_that_are_reset_leave_no_memory_behind() -> None:
    """Without the tasks of ours each leaves a batch's operations, which shows that this looks."""
    assert kept_nbytes() > KEPT_NBYTES_MAX
    assert kept_nbytes("spared") < KEPT_NBYTES_MAX


class _Batch:
    """A call of gRPC's as its task sees it, and what becomes of its batch."""

    def __init__(self) -> None:
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.freed = self.handled = False

    async def execute_batch(self) -> None:
        """Wait for the core, then free the operations."""
        await self.result
        self.freed = True

    async def _handle_exceptions(self) -> None:
        await self.execute_batch()
        self.handled = True
        await asyncio.Event().wait()


def begin(batch: _Batch) -> asyncio.Task[None]:
    """Return the running task of a call."""
    loop = asyncio.get_running_loop()
    spare_batches(loop)
    task = loop.create_task(batch._handle_exceptions())
    assert isinstance(task, CallTask)
    return task


@pytest.mark.asyncio
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_waits_for_the_batch_and_no_longer(times: int) -> None:
    """However often it is repeated: then it comes, at the next thing that is waited for."""
    batch = _Batch()
    task = begin(batch)
    await asyncio.sleep(0)
    for _ in range(times):
        assert task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    batch.result.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.freed


@pytest.mark.asyncio
@pytest.mark.parametrize("act", ["done", "handled"])
async def test_a_cancellation_is_never_lost(act: str) -> None:
    """Also where the batch is done and its task has not heard, and where a handler waits."""
    batch = _Batch()
    task = begin(batch)
    await asyncio.sleep(0)
    batch.result.set_result(None)
    if act == "handled":
        await turn_until(lambda: batch.handled)
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.freed
    assert not task.cancel()


@pytest.mark.asyncio
async def test_other_tasks_and_other_factories_stay_as_they_are() -> None:
    """A loop's own factory is its owner's, and only calls have tasks of this kind."""
    loop = asyncio.get_running_loop()
    spare_batches(loop)
    other = loop.create_task(asyncio.sleep(0))
    assert type(other) is asyncio.Task
    await other

    def own(loop: asyncio.AbstractEventLoop, coro: object, **_: object) -> asyncio.Task[None]:
        raise AssertionError("not to be called")

    set_factory: Callable[[object], None] = loop.set_task_factory  # type: ignore[assignment]
    set_factory(own)
    spare_batches(loop)
    assert loop.get_task_factory() is own
    loop.set_task_factory(None)
