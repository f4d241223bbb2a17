"""Orders to shrink, performed: over the link, measured anew, counted, and never waited for long."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from mlxd.v1 import status_pb2
from mlxd_controller.core import phases
from mlxd_shared import config
from mlxd_shared.domain.errors import ModelDraining
from mlxd_shared.wire.status import RemoteError
from tests.support.calls import error_of, said_in_time
from tests.support.controller_stack import ROOMY, Stack, controller_stack, request, store_of
from tests.support.model_facts import device, need_mib

BUDGET_BYTES = 4000
"""The hard mark lies 200 above the soft one; a fake worker holds 1000, of which it keeps 600."""
TURNS_MAX = 50
"""More events than an order, its answer and an eviction take to be decided on."""


async def value(stack: Stack, name: str, **labels: str) -> float:
    """Return the sum of a family's points with these labels."""
    answer = await stack.status.GetStatus(status_pb2.GetStatusRequest())
    points = next(f for f in answer.status.metrics if f.name == name).points
    return sum(p.value for p in points if labels.items() <= dict(p.labels).items())


def held_bytes(stack: Stack) -> int:
    """Return what the workers hold, as the scheduler knows it."""
    return stack.runtime.state.held_on(stack.runtime.state.devices[0])


async def until(stack: Stack, condition: Callable[[], bool]) -> None:
    """Let events be decided on until `condition` holds."""
    for _ in range(TURNS_MAX):
        if condition():
            return
        await stack.settle()
    assert condition()


@asynccontextmanager
async def measure_idle(
    *, usable_bytes: int, error: RemoteError | None = None
) -> AsyncIterator[Stack]:
    """Yield a controller whose one worker is idle, after others have taken memory."""
    async with controller_stack() as stack:
        await stack.generate()
        stack.workers.script.shrink_error = error
        stack.probe.device = replace(ROOMY, budget_bytes=BUDGET_BYTES, usable_bytes=usable_bytes)
        stack.runtime.measure()
        yield stack


@asynccontextmanager
async def held_for_another() -> AsyncIterator[Stack]:
    """Yield a controller whose model "a", in use, takes no new stream, since "b" waits for room."""
    store = store_of({"a": 10, "b": 10})
    async with controller_stack(store=store, memory=device(need_mib(10) + 10)) as stack:
        stack.workers.script.endless = True
        using = stack.inference.Generate(request("a"))
        await using.read()
        waiting = stack.inference.Generate(request("b"))
        await stack.until("b", phases.Queued)
        stack.pass_time(config.OVERTAKEN_MAX_S)
        await stack.settle()
        assert stack.model("a").held
        yield stack
        using.cancel()
        waiting.cancel()


@pytest.mark.asyncio
async def test_a_worker_shrinks_to_what_is_usable_and_stays() -> None:
    """It is asked once, what it gave is counted, and its model is as ready as before."""
    async with measure_idle(usable_bytes=700) as stack:
        assert isinstance(stack.model("a").phase, phases.Ready)
        await until(stack, lambda: held_bytes(stack) == 700)

        assert stack.workers.links[0].targets == [700]
        assert await value(stack, "mlxd_model_shrinks_total", model="a", outcome="done") == 1
        assert await value(stack, "mlxd_model_shrunk_bytes_total", model="a") == 300
        assert await value(stack, "mlxd_memory_held_bytes", device="cpu") == 700
        assert await value(stack, "mlxd_memory_pressed") == 0
        assert isinstance(stack.model("a").phase, phases.Ready)


@pytest.mark.asyncio
async def test_a_model_goes_where_its_worker_cannot_give_enough() -> None:
    """What is measured after the answer counts: an idle model is evicted, and the reason told."""
    async with measure_idle(usable_bytes=500) as stack:
        await stack.until("a", phases.Unloaded)

        assert stack.workers.links[0].targets == [500]
        assert await value(stack, "mlxd_model_evictions_total", reason="pressure") == 1


@pytest.mark.asyncio
async def test_a_worker_that_fails_to_shrink_holds_nobody_up() -> None:
    """Its failure is counted, and the next step is taken at once."""
    error = RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    async with measure_idle(usable_bytes=700, error=error) as stack:
        await stack.until("a", phases.Unloaded)

        assert await value(stack, "mlxd_model_shrinks_total", outcome="failed") == 1
        assert await value(stack, "mlxd_model_shrunk_bytes_total") == 0


@pytest.mark.asyncio
async def test_streams_outlive_pressure() -> None:
    """A worker in use is asked too, but its model stays while anybody uses it."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request())
        await call.read()
        stack.probe.device = replace(ROOMY, budget_bytes=BUDGET_BYTES, usable_bytes=10)
        stack.runtime.measure()
        await until(stack, lambda: bool(stack.workers.links[0].targets))
        await stack.settle()

        assert stack.runtime.state.pressed
        assert stack.model("a").leases
        call.cancel()


@pytest.mark.asyncio
async def test_a_deadline_during_a_hold_is_not_told_of_a_load() -> None:
    """The model is ready, but takes no new stream: it is to become idle for another."""
    async with held_for_another() as stack:
        error = await said_in_time(
            lambda: error_of(stack.inference.Generate(request("a"), timeout=0.5))
        )

        assert isinstance(error, ModelDraining)


@pytest.mark.asyncio
async def test_who_has_time_waits_until_a_hold_is_over() -> None:
    """Without a deadline nobody is told of a hold."""
    async with held_for_another() as stack:
        late = stack.inference.Generate(request("a"))
        while not stack.model("a").waiters:
            await stack.settle()
        stack.pass_time(config.HOLD_MAX_S)

        assert await late.read() is not grpc.aio.EOF
        late.cancel()


@pytest.mark.asyncio
async def test_a_system_that_lets_nothing_be_opened_ends_no_controller() -> None:
    """As where clients hold all the connections there may be: the last figures hold on."""
    async with controller_stack() as stack:
        await stack.generate()
        before = stack.runtime.state.devices
        stack.probe.error = OSError(errno.EMFILE, "too many open files")

        stack.runtime.measure()
        await stack.settle()
        assert stack.runtime.state.devices == before
        await stack.generate()

        stack.probe.error = None
        stack.probe.device = replace(ROOMY, budget_bytes=BUDGET_BYTES)
        assert stack.runtime.measure()[0].budget_bytes == BUDGET_BYTES
