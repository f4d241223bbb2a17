"""The real launcher, with the real fake worker or the real worker as its child."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mlxd_controller.launcher.subprocess import WORKER_COMMAND, SubprocessLauncher
from mlxd_controller.runtime.ports import WorkerProcess

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
START_S_MAX = 60.0


def fake_command(script: str) -> tuple[str, ...]:
    """Return the command of a fake worker that follows `script`."""
    return (sys.executable, str(FAKE_WORKER), script)


@asynccontextmanager
async def launcher_of(
    command: tuple[str, ...] = WORKER_COMMAND, *, stall_timeout_s: float = START_S_MAX
) -> AsyncIterator[SubprocessLauncher]:
    """Yield a launcher; what it made in the file system is removed."""
    launcher = SubprocessLauncher(
        command=command, stall_timeout_s=stall_timeout_s, orphan_grace_s=1.0
    )
    try:
        yield launcher
    finally:
        launcher.close()


@asynccontextmanager
async def launch(script: str, *, incarnation: str = "i-1") -> AsyncIterator[WorkerProcess]:
    """Yield a fake worker's process that listens; it is ended at the exit."""
    async with launcher_of(fake_command(script)) as launcher:
        process = await launcher.launch(model="m", incarnation=incarnation)
        try:
            yield process
        finally:
            await process.close()
