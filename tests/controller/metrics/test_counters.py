"""What is counted about models: cold starts, ages, and how good the plans were."""

from __future__ import annotations

import pytest

from mlxd.v1 import status_pb2
from mlxd_controller.core import phases
from mlxd_controller.core.state import State
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.services.gauges import gauges
from mlxd_models.fit.planner import plan_load
from mlxd_shared.domain.errors import WorkerLost
from mlxd_shared.domain.figures import WorkerFigures, WorkerMemory
from mlxd_shared.domain.requests import LoadSpec
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack, request
from tests.support.model_facts import device, facts

HOUR_S = 3600.0


async def points(stack: Stack, name: str) -> list[status_pb2.MetricPoint]:
    """Return the points of one family."""
    answer = await stack.status.GetStatus(status_pb2.GetStatusRequest())
    return list(next(f for f in answer.status.metrics if f.name == name).points)


@pytest.mark.asyncio
async def test_only_requests_that_waited_for_their_model_are_cold_starts() -> None:
    """The first request waits for the load, the second for nothing."""
    async with controller_stack() as stack:
        stack.workers.script.load_gate.clear()
        call = stack.inference.Generate(request())
        await stack.until("a", phases.Loading)
        stack.pass_time(3)
        stack.workers.script.load_gate.set()
        assert [message async for message in call]
        await stack.generate()
        (point,) = await points(stack, "mlxd_model_cold_starts_total")

    assert (dict(point.labels), point.value) == ({"model": "a"}, 1)


@pytest.mark.asyncio
async def test_the_age_of_a_model_is_told_when_it_goes() -> None:
    """Half an hour ready, then unloaded: one age of 1800 s, with the reason."""
    async with controller_stack() as stack:
        await stack.generate()
        stack.clock.now += HOUR_S / 2
        await stack.unload("digest-a")
        (point,) = await points(stack, "mlxd_model_age_at_eviction_seconds")

    assert dict(point.labels) == {"model": "a", "reason": "asked"}
    assert point.histogram.sum == HOUR_S / 2
    assert sum(point.histogram.counts) == 1
    assert max(point.histogram.bounds) > HOUR_S


@pytest.mark.asyncio
async def test_a_load_that_is_broken_off_has_no_age() -> None:
    """It is an eviction, but of a model that never was ready."""
    async with controller_stack() as stack:
        await stack.generate()
        await stack.unload("digest-a")
        stack.workers.script.load_gate.clear()
        call = stack.inference.Generate(request())
        await stack.until("a", phases.Loading)
        await stack.unload("digest-a")
        call.cancel()
        (age,) = await points(stack, "mlxd_model_age_at_eviction_seconds")
        (evictions,) = await points(stack, "mlxd_model_evictions_total")

    assert sum(age.histogram.counts) == 1
    assert evictions.value == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cancelled", "lost"])
async def test_tokens_of_a_stream_that_breaks_off_are_counted(how: str) -> None:
    """Three were generated, whether the client left or the worker died then."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request(migrate=False))
        messages = aiter(call)
        for _ in range(3):
            await anext(messages)
        if how == "cancelled":
            call.cancel()
            await stack.runtime.unload("digest-a", grace_s=HOUR_S, force=False)
        else:
            stack.workers.launcher.processes[0].end(-9)
            assert isinstance(await error_of(call), WorkerLost)
        (point,) = await points(stack, "mlxd_generation_tokens_total")

    assert (dict(point.labels), point.value) == ({"model": "a"}, 3)


@pytest.mark.parametrize(("part", "error"), [(0.25, -0.75), (1.5, 0.5)])
def test_a_plan_is_held_against_the_measured_peak(part: float, error: float) -> None:
    """Below 0 the plan was too large, above 0 too small; the process is in neither."""
    plan = plan_load(facts(100), LoadSpec(), device(1 << 14))
    worker = Worker(
        number=1, digest="d", name="m", path="/m", plan=plan, incarnation="i", started_unix_s=0.0
    )
    silent = {family.name: family for family in gauges(State(devices=(device(1),)), [worker])}
    arrays_bytes = plan.arrays_bytes
    memory = WorkerMemory(mlx_peak_nbytes=int(part * arrays_bytes))
    worker.note_figures(WorkerFigures(memory=memory), 0.0)
    families = {family.name: family for family in gauges(State(devices=(device(1),)), [worker])}

    name = "mlxd_fit_estimate_error_ratio"
    assert not silent[name].points
    assert families[name].points[0].value == pytest.approx(error, abs=1e-6)
    assert families["mlxd_memory_peak_bytes"].points[0].value == int(part * arrays_bytes)
