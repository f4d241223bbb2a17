"""The runtime itself: a bug ends it loudly, nobody waits for answers that will not come."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from mlxd_controller.core import phases
from mlxd_controller.core.demand import NO_DEMAND
from mlxd_controller.core.events import ShutDown
from mlxd_controller.core.state import Model, State
from mlxd_controller.runtime.changes import WATCH_QUEUE_MAX, Changes
from mlxd_controller.runtime.ports import ModelRef, Ports
from mlxd_controller.runtime.runtime import Runtime
from mlxd_models.fit.planner import plan_load
from mlxd_shared.domain.errors import InvalidModel, QueueFull, ShuttingDown
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec, SamplingOptions
from mlxd_shared.ops.metrics import labels
from tests.fakes.workers import FakeWorkers
from tests.fakes.world import FakeClock, FakeProbe
from tests.support.controller_stack import controller_stack
from tests.support.model_facts import device, facts

REF = ModelRef("d", "m", (), Path("/m"), facts(10), SamplingOptions())
MEMORY = device(1 << 14)
PLAN = plan_load(facts(10), LoadSpec(), MEMORY)
READY = phases.Ready(1, PLAN, since_s=0.0)


def make_runtime(workers: FakeWorkers) -> Runtime:
    """Return a runtime over fakes that has not begun to run."""
    ports = Ports(workers.launcher, workers.connect, FakeProbe(MEMORY), FakeClock())
    return Runtime(ports, State(devices=(MEMORY,)), stall_timeout_s=60.0)


class Broken(Exception):
    """A bug."""


class BrokenProbe:
    """A probe with a bug."""

    def read(self, own_pids: object) -> tuple[()]:
        """Fail as no port may."""
        raise Broken

    def machines(self) -> tuple[()]:
        """Return none but this one."""
        return ()


@pytest.mark.asyncio
async def test_a_bug_while_deciding_ends_the_runtime_and_every_wait() -> None:
    """run() raises it; who waits is told to come back, and so is who comes later."""
    workers = FakeWorkers()
    ports = Ports(workers.launcher, workers.connect, BrokenProbe(), FakeClock())
    runtime = Runtime(ports, State(devices=(MEMORY,)), stall_timeout_s=60.0)
    running = asyncio.create_task(runtime.run())

    with pytest.raises(ShuttingDown):
        async with runtime.lease(REF, keep_alive_s=None, timeout_s=None):
            pass
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert caught.group_contains(Broken)
    with pytest.raises(ShuttingDown):
        async with runtime.lease(REF, keep_alive_s=None, timeout_s=None):
            pass


@pytest.mark.asyncio
async def test_a_bug_in_a_task_ends_the_runtime_and_leaves_no_process() -> None:
    """What was started is ended on the way out."""
    workers = FakeWorkers()
    runtime = make_runtime(workers)
    running = asyncio.create_task(runtime.run())
    async with runtime.lease(REF, keep_alive_s=None, timeout_s=None):
        workers.launcher.failure = Broken()
        other = replace(REF, digest="other", name="other")
        with pytest.raises(ShuttingDown):
            async with runtime.lease(other, keep_alive_s=None, timeout_s=None):
                pass
        with pytest.raises(ExceptionGroup) as caught:
            await running
    assert caught.group_contains(Broken)
    assert workers.living == 0


@pytest.mark.asyncio
async def test_a_shutdown_ends_streams_at_the_grace_and_stops_every_worker() -> None:
    """The lease hears ShuttingDown; run() returns when no process is left."""
    workers = FakeWorkers()
    runtime = make_runtime(workers)
    running = asyncio.create_task(runtime.run())
    async with runtime.lease(REF, keep_alive_s=None, timeout_s=None) as lease:
        runtime.post(ShutDown(0.0))
        await running
        assert isinstance(lease.aborted, ShuttingDown)
    assert workers.living == 0


@pytest.mark.asyncio
async def test_cancelling_a_wait_leaves_the_load_to_the_others() -> None:
    """One of two waiters goes: one load, one lease."""
    workers = FakeWorkers()
    workers.script.load_gate.clear()
    runtime = make_runtime(workers)
    running = asyncio.create_task(runtime.run())

    async def hold() -> int:
        async with runtime.lease(REF, keep_alive_s=None, timeout_s=None) as lease:
            return lease.worker.number

    with runtime.changes.subscribe() as news:
        first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
        while not isinstance((await news.next()).phase, phases.Loading):
            pass
    first.cancel()
    workers.script.load_gate.set()
    assert await second == 1
    with pytest.raises(asyncio.CancelledError):
        await first
    runtime.post(ShutDown(0.0))
    await running
    assert len(workers.launcher.processes) == 1


@pytest.mark.asyncio
async def test_loads_are_timed_by_how_they_ended() -> None:
    """Ready, cancelled by an unload, or failed: each once."""
    async with controller_stack() as stack:
        script = stack.workers.script
        await stack.generate()
        await stack.unload("digest-a")
        script.load_gate.clear()
        waiting = asyncio.create_task(stack.generate())
        await stack.until("a", phases.Loading)
        await stack.unload("digest-a")
        with pytest.raises(grpc.aio.AioRpcError):
            await waiting
        script.load_gate.set()
        script.load_error = InvalidModel("broken", "config.json")
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.generate()
        counts = stack.runtime.metrics.load_seconds.counts
    assert {key: sum(each) for key, each in counts.items()} == {
        labels(model="a", outcome=outcome): 1 for outcome in ("ready", "cancelled", "failed")
    }


@pytest.mark.asyncio
async def test_another_lease_of_a_ready_model_is_no_news() -> None:
    """Each model is compared with what it was before the event, not with nothing."""
    runtime = make_runtime(FakeWorkers())
    running = asyncio.create_task(runtime.run())

    async with runtime.lease(REF, keep_alive_s=None, timeout_s=None):
        with runtime.changes.subscribe() as news:
            async with runtime.lease(REF, keep_alive_s=None, timeout_s=None):
                pass
            assert news.pending() == []
    runtime.post(ShutDown(0.0))
    await running


def model(phase: phases.Phase, *, digest: str = "d") -> Model:
    """Return a model in a phase."""
    return Model(digest, "m", "/m", facts(1), 300.0, phase=phase)


def loading(step: int) -> phases.Loading:
    """Return a load that has come so far."""
    return phases.Loading(1, PLAN, 0.0, NO_DEMAND, LoadProgress("s", step, 10))


@pytest.mark.asyncio
async def test_a_slow_reader_misses_progress_but_no_phase() -> None:
    """Within a phase the latest stands for all; phases come in order."""
    changes = Changes()
    with changes.subscribe("d") as news:
        before: Model | None = None
        for after in (
            model(loading(0)), model(loading(1)), model(loading(2)),
            model(READY), model(phases.Unloading(1, PLAN, phases.StopReason.ROOM)),
            model(loading(0)), model(loading(0), digest="other"),
        ):  # fmt: skip
            changes.publish(before, after)
            before = after
        news_items = news.pending()
    assert [type(m.phase) for m in news_items] == [
        phases.Loading, phases.Ready, phases.Unloading, phases.Loading,
    ]  # fmt: skip
    assert news_items[0].phase == loading(2)


@pytest.mark.asyncio
async def test_a_reader_too_far_behind_is_told_so() -> None:
    """WATCH_QUEUE_MAX changes are kept, no more; then the reader hears QueueFull."""
    changes = Changes()
    with changes.subscribe() as news:
        for index in range(WATCH_QUEUE_MAX + 1):
            changes.publish(None, model(READY, digest=f"d{index}"))
        with pytest.raises(QueueFull) as caught:
            await news.next()
    assert caught.value.limit == WATCH_QUEUE_MAX


def test_what_changes_with_every_request_is_no_news() -> None:
    """Leases and times of use are not published."""
    changes = Changes()
    with changes.subscribe() as news:
        leased = replace(READY, leases=frozenset({"t"}))
        changes.publish(model(READY), replace(model(leased), last_used_s=1.0))
        assert news.pending() == []
