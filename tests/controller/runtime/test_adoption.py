"""The runtime and workers of a former controller; and what it leaves word of for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mlxd_controller.core import phases
from mlxd_controller.core.events import ShutDown
from mlxd_controller.core.state import State
from mlxd_controller.crew import with_survivors
from mlxd_controller.memory.nvidia import Gpu
from mlxd_controller.runtime.adoption import enrol
from mlxd_controller.runtime.ports import Holding, ModelRef, Ports, Survivor
from mlxd_controller.runtime.runtime import Runtime
from mlxd_shared.domain.figures import ModelState, WorkerFigures, WorkerMemory
from mlxd_shared.domain.requests import KVFormat, LoadSpec, SamplingOptions, Weights
from tests.fakes.workers import FakeProcess, FakeWorkers
from tests.fakes.world import FakeClock, FakeProbe
from tests.support.controller_stack import controller_stack, request, store_of
from tests.support.model_facts import device, facts, need_mib
from tests.support.turns import turn_until

REF = ModelRef("d", "m", (), Path("/m"), facts(10), SamplingOptions())
OTHER = replace(REF, digest="e", name="n")


async def survivor(
    workers: FakeWorkers,
    ref: ModelRef = REF,
    *,
    spec: LoadSpec | None = None,
    load_s: float = 1.0,
    on: str = "cpu",
) -> Survivor:
    """Return a ready worker that somebody has launched before."""
    process = await workers.launcher.launch(model=ref.name, incarnation=f"old-{ref.name}")
    link = workers.connect(
        address=process.address, incarnation=process.incarnation, digest=ref.digest
    )
    own = WorkerFigures(
        pid=process.pid,
        incarnation=process.incarnation,
        state=ModelState.READY,
        context_length=512,
        rows_max=2,
        weights=Weights.FLOAT32,
        kv_format=KVFormat.MODEL,
        memory=WorkerMemory(mlx_active_nbytes=workers.script.arrays_bytes, devices={on: 0}),
    )
    holding = Holding(ref.digest, ref.name, str(ref.path), spec or LoadSpec(), load_s)
    return Survivor(process, link, own, holding, ref, on)


@asynccontextmanager
async def running(
    workers: FakeWorkers,
    survivors: Iterable[Survivor],
    *,
    room_mib: int = 1 << 14,
    probe: FakeProbe | None = None,
) -> AsyncIterator[Runtime]:
    """Run a runtime that has adopted them; afterwards no process is left."""
    probe, clock = probe or FakeProbe(device(room_mib)), FakeClock()
    memory = probe.device
    state = State(devices=(memory,))
    ports = Ports(workers.launcher, workers.connect, probe, clock)
    runtime = Runtime(ports, state, stall_timeout_s=60.0)
    runtime.adopt(enrol(survivors, state, clock))
    task = asyncio.create_task(runtime.run())
    try:
        yield runtime
    finally:
        runtime.post(ShutDown(0.0))
        await task
    assert workers.living == 0


async def used_process(runtime: Runtime, ref: ModelRef = REF) -> object:
    """Return the process that serves a request for `ref`."""
    async with runtime.lease(ref, keep_alive_s=None, timeout_s=None) as lease:
        return lease.worker.process


@pytest.mark.asyncio
async def test_a_request_uses_the_adopted_worker_and_its_death_is_seen() -> None:
    """No launch for the first request; when the process ends, the next one launches."""
    workers = FakeWorkers()
    old = await survivor(workers)
    async with running(workers, [old]) as runtime:
        assert await used_process(runtime) is old.process
        model = runtime.state.models["d"]
        assert model.plan is not None
        assert (model.plan.context_length, model.plan.rows_max) == (512, 2)
        (worker,) = runtime.workers.live()
        assert (worker.incarnation, worker.figures) == ("old-m", old.figures)

        assert isinstance(old.process, FakeProcess)
        with runtime.changes.subscribe() as news:
            old.process.end(255)
            while not isinstance((await news.next()).phase, phases.Failed):
                pass
        assert await used_process(runtime) is workers.launcher.processes[1]


@pytest.mark.asyncio
async def test_an_adopted_worker_is_measured_and_shrinks() -> None:
    """What it holds counts before it is first asked; above the marks it is told to give back."""
    workers, probe = FakeWorkers(), FakeProbe(device(1 << 14))
    old = await survivor(workers)
    async with running(workers, [old], probe=probe) as runtime:
        await used_process(runtime)
        assert probe.pids == (old.process.pid,)
        assert runtime.state.arrays == {1: 1000}

        probe.device = replace(probe.device, budget_bytes=4000, usable_bytes=700)
        runtime.measure()
        await turn_until(lambda: runtime.state.arrays == {1: 700})
        assert workers.links[0].targets == [700]
        assert isinstance(runtime.state.models["d"].phase, phases.Ready)


@pytest.mark.asyncio
async def test_the_pinned_and_the_dear_stay_where_there_is_no_room_for_all() -> None:
    """Whichever is found first: pinned before all, then what took longest to load."""
    workers = FakeWorkers()
    cheap = await survivor(workers, load_s=1.0)
    dear = await survivor(workers, OTHER, load_s=9.0)
    async with running(workers, [cheap, dear], room_mib=need_mib(10)) as runtime:
        assert await used_process(runtime, OTHER) is dear.process
        await cheap.process.wait_exited()

    workers = FakeWorkers()
    cheap = await survivor(workers, spec=LoadSpec(pinned=True))
    dear = await survivor(workers, OTHER, load_s=9.0)
    async with running(workers, [dear, cheap], room_mib=need_mib(10)) as runtime:
        assert await used_process(runtime) is cheap.process
        await dear.process.wait_exited()


@pytest.mark.asyncio
async def test_word_is_left_of_what_is_ready_and_of_nothing_else() -> None:
    """From ready to draining the record holds the model, with what is fixed for it now."""
    store = store_of({"a": 10})
    async with controller_stack(store=store) as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request())
        await anext(aiter(call))
        (process,) = stack.workers.launcher.processes
        holding = process.holding
        assert holding is not None
        assert (holding.name, holding.spec) == ("a", LoadSpec(pinned=False))

        ref = await store.resolve("a")
        async with stack.runtime.loading(ref, LoadSpec(pinned=True, keep_alive_s=9.0)) as answer:
            await answer
        assert process.holding is not None
        assert process.holding.spec == LoadSpec(pinned=True, keep_alive_s=9.0)

        unloading = asyncio.create_task(stack.runtime.unload(ref.digest, grace_s=60.0, force=False))
        await stack.until("a", phases.Draining)
        assert process.holding is None
        call.cancel()
        await unloading


@pytest.mark.asyncio
async def test_what_adopted_workers_hold_of_a_gpu_is_not_others() -> None:
    """Each GPU is taken as it was before any worker ran: what its own workers hold comes back."""
    workers = FakeWorkers()
    gpus = tuple(Gpu(index, f"GPU-{index}", "H200", 5000, 3000) for index in range(2))
    survivors_found = [
        await survivor(workers, on="gpu1"),
        await survivor(workers, OTHER, on="gpu1"),
    ]
    free = [gpu.free_bytes for gpu in with_survivors(gpus, survivors_found)]
    assert free == [3000, 3000 + 2 * workers.script.arrays_bytes]
