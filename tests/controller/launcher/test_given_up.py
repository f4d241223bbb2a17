"""A launch that is given up at any moment of its start leaves no process and no pipe."""

from __future__ import annotations

import asyncio
import errno
import gc

import psutil
import pytest

from mlxd_controller.launcher.process import SubprocessWorker
from mlxd_controller.launcher.subprocess import SubprocessLauncher
from mlxd_shared.domain.errors import MachineShort
from tests.support.launching import fake_command, launcher_of

TURNS_MAX = 8
"""More turns of the event loop than there are before the wait for the ready line."""
CLOSING_TURNS = 20


async def give_up_after(count: int, launcher: SubprocessLauncher) -> None:
    """Begin a launch and cancel it after `count` turns of the event loop."""
    launch = asyncio.create_task(launcher.launch(model="m", incarnation=f"i-{count}"))
    for _ in range(count):
        await asyncio.sleep(0)
    launch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launch
    for _ in range(CLOSING_TURNS):  # transports close at the loop's next turns
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_launch_given_up_while_it_starts_leaves_nothing() -> None:
    """Neither a process that nobody owns nor the descriptors of its pipes."""
    async with launcher_of(fake_command("hang")) as launcher:
        await give_up_after(0, launcher)
        gc.collect()  # what others left behind is not closed while descriptors are counted
        own = psutil.Process()
        children = set(own.children())
        before = own.num_fds()
        for count in range(TURNS_MAX):
            await give_up_after(count, launcher)
            assert own.num_fds() <= before, count
            assert set(own.children()) <= children, count


class _Unlucky(SubprocessLauncher):
    """Nothing can be opened any more once the process has started."""

    def _note(self, worker: SubprocessWorker) -> None:
        raise OSError(errno.EMFILE, "too many open files")


@pytest.mark.asyncio
async def test_a_launch_that_cannot_be_noted_leaves_no_process() -> None:
    """It fails by the system's word, and what had been started is ended."""
    launcher = _Unlucky(command=fake_command("hang"))
    try:
        with pytest.raises(MachineShort, match="the worker of m: too many open files"):
            await launcher.launch(model="m", incarnation="i")
        assert psutil.Process().children() == []
    finally:
        launcher.close()
