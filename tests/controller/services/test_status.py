"""StatusService over real gRPC with fake workers: figures, the dead, metrics, no waiting."""

from __future__ import annotations

import asyncio

import pytest

from mlxd.v1 import status_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_controller.runtime.workers import DEAD_SHOWN_S
from mlxd_shared.domain.errors import InvalidRequest, ModelNotFound, WorkerExited
from mlxd_shared.ops.machine import this_machine
from mlxd_shared.wire.records import duration_to_pb
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack, request, store_of

FAMILIES = {
    "mlxd_requests_total", "mlxd_prompt_tokens_total", "mlxd_cached_tokens_total",
    "mlxd_model_loads_total", "mlxd_model_evictions_total", "mlxd_worker_restarts_total",
    "mlxd_cache_hits_total", "mlxd_cache_misses_total", "mlxd_time_to_first_token_seconds",
    "mlxd_inter_token_latency_seconds", "mlxd_model_load_seconds", "mlxd_requests_running",
    "mlxd_requests_waiting", "mlxd_oldest_wait_seconds", "mlxd_memory_budget_bytes",
}  # fmt: skip


async def status_of(stack: Stack, model: str = "") -> status_pb2.Status:
    """Return the controller's status."""
    return (await stack.status.GetStatus(status_pb2.GetStatusRequest(model=model))).status


def value(status: status_pb2.Status, family: str, **labels: str) -> float:
    """Return one counter's value; 0 where it has no such point."""
    points = next(f for f in status.metrics if f.name == family).points
    return sum(
        point.value
        for point in points
        if all(point.labels.get(name) == text for name, text in labels.items())
    )


@pytest.mark.asyncio
async def test_a_status_tells_of_the_machine_and_of_every_worker() -> None:
    """Role, memory, devices with what is promised, each worker with its figures and their age."""
    async with controller_stack() as stack:
        await stack.generate()
        status = await status_of(stack)

        assert status.role == status_pb2.PROCESS_ROLE_CONTROLLER
        assert status.host_memory.total_bytes > status.host_memory.resident_bytes > 0
        (machine,) = status.machines
        assert machine.machine_id == status.host_memory.machine_id == this_machine().id
        assert machine.total_bytes == status.host_memory.total_bytes
        (device,) = status.devices
        assert device.budget_bytes > device.reserved_bytes > 0
        (worker,) = status.workers
        assert worker.model_name == "a"
        assert worker.state == types_pb2.MODEL_STATE_READY
        assert worker.memory.total_bytes == 1000
        assert worker.HasField("figures_age")
        assert not worker.HasField("exit_code")


@pytest.mark.asyncio
async def test_a_worker_that_does_not_answer_delays_nobody() -> None:
    """Figures come from before, and say how old they are."""
    async with controller_stack() as stack:
        await stack.generate()
        await status_of(stack)
        stack.workers.script.status_gate.clear()
        stack.clock.now += 30
        status = await status_of(stack)
        assert status.workers[0].figures_age.seconds == 30
        assert status.workers[0].memory.total_bytes == 1000
        stack.workers.script.status_gate.set()


@pytest.mark.asyncio
async def test_a_dead_worker_is_remembered_with_code_error_and_last_lines() -> None:
    """After a crash, and after a failed start; a replaced worker stands beside its forerunner."""
    async with controller_stack() as stack:
        await stack.generate()
        process = stack.workers.launcher.processes[0]
        process.lines.append("segmentation fault")
        process.end(-11)
        await stack.until("a", phases.Failed)
        (dead,) = (await status_of(stack)).workers
        assert (dead.exit_code, dead.state) == (-11, types_pb2.MODEL_STATE_FAILED)
        assert "signal 11" in dead.last_error
        assert list(dead.last_lines) == ["segmentation fault"]

        await stack.generate()
        both = (await status_of(stack)).workers
        assert [worker.HasField("exit_code") for worker in both] == [False, True]


@pytest.mark.asyncio
async def test_a_dead_worker_holds_nothing() -> None:
    """Memory and streams of a process end with it, whatever it told last."""
    async with controller_stack() as stack:
        await stack.generate()
        (living,) = (await status_of(stack)).workers
        assert living.memory.total_bytes == 1000
        stack.workers.launcher.processes[0].end(-9)
        await stack.until("a", phases.Failed)
        (dead,) = (await status_of(stack)).workers
        assert dead.exit_code == -9
        assert (dead.memory.total_bytes, dead.streams_running) == (0, 0)


@pytest.mark.asyncio
async def test_a_worker_that_did_not_start_is_remembered_with_code_and_last_lines() -> None:
    """Its process was never the controller's to ask: the launcher's error has what is known."""
    async with controller_stack() as stack:
        stack.workers.launcher.failure = WorkerExited("a", ("no such library",), -9)
        assert isinstance(await error_of(stack.inference.Generate(request())), WorkerExited)
        (dead,) = (await status_of(stack)).workers
        assert (dead.exit_code, dead.state) == (-9, types_pb2.MODEL_STATE_FAILED)
        assert list(dead.last_lines) == ["no such library"]


@pytest.mark.asyncio
async def test_a_failure_is_shown_for_a_while() -> None:
    """Until somebody has seen to the model, by unloading it, and no longer than it is news."""
    async with controller_stack() as stack:
        for seen_to in (True, False):
            stack.workers.launcher.failure = WorkerExited("a", ("no such library",), -9)
            assert isinstance(await error_of(stack.inference.Generate(request())), WorkerExited)
            assert len((await status_of(stack)).workers) == 1
            if seen_to:
                await stack.unload("digest-a")
            else:
                stack.clock.now += DEAD_SHOWN_S + 1
            assert not (await status_of(stack)).workers


@pytest.mark.asyncio
async def test_a_stopped_worker_is_forgotten() -> None:
    """What ended as it was told to is no failure to show."""
    async with controller_stack() as stack:
        await stack.generate()
        await stack.unload("digest-a")
        assert not (await status_of(stack)).workers


@pytest.mark.asyncio
async def test_counters_count_what_happened() -> None:
    """Requests by code and finish, tokens, loads, restarts and evictions by reason, misses."""
    async with controller_stack() as stack:
        await stack.generate()
        stack.workers.launcher.processes[0].end(-9)
        await stack.until("a", phases.Failed)
        await stack.generate()
        await error_of(stack.inference.Generate(request("nobody")))
        await stack.unload("digest-a")
        status = await status_of(stack)

        assert {family.name for family in status.metrics} >= FAMILIES
        done = value(status, "mlxd_requests_total", model="a", code="OK", finish_reason="length")
        assert done == 2
        assert value(status, "mlxd_requests_total", model="unknown", code="NOT_FOUND") == 1
        assert value(status, "mlxd_model_loads_total", model="a", reason="request") == 2
        assert value(status, "mlxd_worker_restarts_total", reason="WorkerLost") == 1
        assert value(status, "mlxd_model_evictions_total", reason="asked") == 1
        assert value(status, "mlxd_cache_misses_total", reason="evicted") == 2


@pytest.mark.asyncio
async def test_a_cancelled_request_is_counted_as_one() -> None:
    """Code CANCELLED, without a finish."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request())
        await anext(aiter(call))
        call.cancel()
        await stack.runtime.unload("digest-a", grace_s=600, force=False)
        status = await status_of(stack)
        assert value(status, "mlxd_requests_total", code="CANCELLED", finish_reason="none") == 1


@pytest.mark.asyncio
async def test_a_failed_start_is_in_the_status() -> None:
    """Why the model is FAILED, where its worker never listened."""
    async with controller_stack() as stack:
        stack.workers.launcher.failure = WorkerExited("a", ("no",), 7)
        await error_of(stack.inference.Generate(request()))
        (dead,) = (await status_of(stack)).workers
        assert "code 7" in dead.last_error


@pytest.mark.asyncio
async def test_a_status_of_one_model_is_of_its_workers_only() -> None:
    """A name filters; an unknown one is refused."""
    async with controller_stack(store=store_of({"a": 10, "b": 10})) as stack:
        await asyncio.gather(stack.generate("a"), stack.generate("b"))
        assert [w.model_name for w in (await status_of(stack, "b")).workers] == ["b"]
        call = stack.status.GetStatus(status_pb2.GetStatusRequest(model="nobody"))
        assert isinstance(await error_of(call), ModelNotFound)


@pytest.mark.asyncio
async def test_a_watch_repeats_and_has_a_lowest_interval() -> None:
    """At once and then at every interval; below 100 ms, or for ever, is refused."""
    async with controller_stack() as stack:
        watch = status_pb2.WatchStatusRequest(interval=duration_to_pb(0.1))
        call = stack.status.WatchStatus(watch)
        messages = aiter(call)
        first, second = await anext(messages), await anext(messages)
        assert second.status.now.ToNanoseconds() >= first.status.now.ToNanoseconds()
        call.cancel()
        for seconds in (0.05, -1.0):
            bad = status_pb2.WatchStatusRequest(interval=duration_to_pb(seconds))
            assert isinstance(await error_of(stack.status.WatchStatus(bad)), InvalidRequest)
