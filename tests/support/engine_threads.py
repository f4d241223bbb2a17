"""Engine threads inside the test process, and a worker without a server around one."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_shared.serving.server import Health
from mlxd_worker.front.worker import Identity, Worker
from mlxd_worker.machine.backend import Backend
from mlxd_worker.machine.blas_library import BlasReport
from mlxd_worker.thread.engine_thread import EngineThread
from mlxd_worker.thread.facts import Figures, LoadJob


def kind() -> DeviceKind:
    """Return the backend that the tests run on."""
    return choose_backend(installed_versions(), platform=sys.platform).kind


@dataclass(slots=True)
class Started:
    """A running engine thread and how often it reported a fault."""

    engine: EngineThread
    faults: list[int] = field(default_factory=list)
    faulted: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self, folder: Path) -> None:
        """Load a model."""
        job = LoadJob(folder, "tiny", "d" * 64, LoadSpec(rows_max=2))
        await self.engine.load(job, lambda _: None)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Keep the thread busy with something else meanwhile, as a long step does."""
        gate, reached = threading.Event(), threading.Event()

        def wait(_: object) -> None:
            reached.set()
            gate.wait()

        task = asyncio.ensure_future(self.engine._call(wait))
        await asyncio.to_thread(reached.wait)
        try:
            yield
        finally:
            gate.set()
        await task


async def figures_now(engine: EngineThread) -> Figures:
    """Return figures of after the call, however long the thread takes to give them."""
    asked_s = time.monotonic()
    while (figures := await engine.figures()).at_s < asked_s:
        pass
    return figures


@asynccontextmanager
async def running_engine() -> AsyncIterator[Started]:
    """A running engine thread, stopped at the end."""
    faults: list[int] = []
    faulted = asyncio.Event()

    def on_fault() -> None:
        faults.append(1)
        faulted.set()

    engine = EngineThread(device=kind(), loop=asyncio.get_running_loop(), on_fault=on_fault)
    engine.start()
    yield Started(engine, faults, faulted)
    await engine.stop()


def worker_on(started: Started, device: str = "") -> Worker:
    """Return a worker without a server around a running engine thread."""
    blas = BlasReport("reference", "", "", 1, "")
    backend = Backend(kind(), "mlx", "0", compile_allowed=False, compile_reason="", blas=blas)
    identity = Identity("me", "", backend, device)
    return Worker(identity, started.engine, Health(), stopping=asyncio.Event())
