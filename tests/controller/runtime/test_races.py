"""Ends of workers that cross with what is asked of them: whatever comes first, nothing breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxd_controller.core import phases
from mlxd_controller.core.events import ShutDown
from mlxd_controller.core.state import State
from mlxd_controller.runtime.ports import ModelRef, Ports
from mlxd_controller.runtime.runtime import Lease, Runtime
from mlxd_shared.domain.errors import MlxdError, ModelUnloaded, WorkerStartFailed
from mlxd_shared.domain.requests import SamplingOptions
from tests.fakes.workers import FakeWorkers
from tests.fakes.world import FakeClock, FakeProbe
from tests.support.model_facts import device, facts

REF = ModelRef("d", "m", (), Path("/m"), facts(10), SamplingOptions())
MEMORY = device(1 << 14)
TURNS_MAX = 12
"""More turns of the event loop than the end of a worker takes to be decided on."""


@dataclass(frozen=True, slots=True)
class Running:
    """A runtime that runs, and its workers."""

    runtime: Runtime
    workers: FakeWorkers

    async def phase(self, phase: type[phases.Phase]) -> None:
        """Wait until the model is in `phase`."""
        with self.runtime.changes.subscribe() as news:
            model = self.runtime.state.models.get(REF.digest)
            while model is None or not isinstance(model.phase, phase):
                model = await news.next()

    async def ready(self) -> None:
        """Have the model loaded, and used by nobody."""
        async with self.lease():
            pass

    @asynccontextmanager
    async def lease(self, *, keep_alive_s: float | None = None) -> AsyncIterator[Lease]:
        """Hold a lease on the model."""
        async with self.runtime.lease(REF, keep_alive_s=keep_alive_s, timeout_s=None) as lease:
            yield lease


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    """Run a runtime around the body; fails if it broke or left a process."""
    workers = FakeWorkers()
    ports = Ports(workers.launcher, workers.connect, FakeProbe(MEMORY), FakeClock())
    runtime = Runtime(ports, State(devices=(MEMORY,)), stall_timeout_s=60.0)
    task = asyncio.create_task(runtime.run())
    try:
        yield Running(runtime, workers)
    finally:
        runtime.post(ShutDown(0.0))
        await task
    assert workers.living == 0
    assert not runtime.workers.live()


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("count", range(TURNS_MAX))
async def test_a_request_may_cross_with_the_end_of_its_worker(count: int) -> None:
    """It gets the worker that has gone, or a new one: at no turn of the loop is it an error."""
    async with running() as stack:
        await stack.ready()
        stack.workers.launcher.processes[0].end(-9)
        await turns(count)
        async with stack.lease() as lease:
            assert lease.worker.number in {1, 2}


@pytest.mark.asyncio
@pytest.mark.parametrize("count", range(TURNS_MAX))
async def test_a_model_may_expire_while_its_worker_ends(count: int) -> None:
    """The last lease of a model that nobody wants to keep ends as its worker does."""
    async with running() as stack:
        async with stack.lease(keep_alive_s=0.0):
            stack.workers.launcher.processes[0].end(-9)
            await turns(count)
        await turns(TURNS_MAX)
        assert isinstance(stack.runtime.state.models["d"].phase, phases.Cold)
        async with stack.lease() as lease:
            assert lease.worker.number == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("count", range(TURNS_MAX))
async def test_an_unload_may_cross_with_the_failure_of_a_load(count: int) -> None:
    """Both are answered, and the model can be loaded again."""
    async with running() as stack:
        stack.workers.script.load_gate.clear()
        stack.workers.script.load_error = WorkerStartFailed("m")
        waiting = asyncio.create_task(stack.ready())
        await stack.phase(phases.Loading)
        await turns(TURNS_MAX)
        stack.workers.script.load_gate.set()
        await turns(count)
        assert await stack.runtime.unload("d", grace_s=0.0, force=True) == 0
        with pytest.raises(MlxdError) as caught:
            await waiting
        assert isinstance(caught.value, ModelUnloaded | WorkerStartFailed)
        stack.workers.script.load_error = None
        await stack.ready()
