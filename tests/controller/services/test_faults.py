"""Faults that other servers had to mend, met over the controller's own gRPC with fake workers.

The numbers are those of the table in docs/evidence/caches.md.
"""

from __future__ import annotations

import asyncio

import pytest

from mlxd.v1 import model_pb2, status_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_shared import config
from tests.fakes.store import FakeStore
from tests.support.controller_stack import Stack, controller_stack, store_of
from tests.support.model_facts import device, facts, need_mib

TURNS_MAX = 12
"""More turns of the event loop than an unload takes to be decided on."""
STATES = {types_pb2.MODEL_STATE_READY, types_pb2.MODEL_STATE_UNLOADING}


async def list_models(stack: Stack) -> list[types_pb2.Model]:
    """Return what `mlxd ps` shows."""
    return list((await stack.models.ListModels(model_pb2.ListModelsRequest())).models)


async def status_of(stack: Stack) -> status_pb2.Status:
    """Return the controller's status."""
    return (await stack.status.GetStatus(status_pb2.GetStatusRequest())).status


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_ps_shows_the_context_in_force() -> None:
    """Fault 33: what the worker was told to serve, not what the model or a client would like."""
    store = FakeStore({"a": ("digest-a", facts(10, context_max=1 << 20))})
    async with controller_stack(store=store, memory=device(need_mib(10) * 2)) as stack:
        await stack.generate()
        (spec,) = stack.workers.links[0].specs
        (shown,) = await list_models(stack)
        (worker,) = (await status_of(stack)).workers

        assert spec.context_length is not None
        assert spec.context_length < shown.context_length_max == 1 << 20
        assert shown.context_length == spec.context_length == worker.context_length


@pytest.mark.asyncio
@pytest.mark.parametrize("count", range(TURNS_MAX))
async def test_a_listing_may_cross_with_an_unload(count: int) -> None:
    """Fault 35: list and status, begun at any turn of an unload, are whole and of one moment."""
    store = store_of({"a": 10, "b": 10, "c": 10})
    async with controller_stack(store=store) as stack:
        await asyncio.gather(*(stack.generate(name) for name in "abc"))
        unloads = [asyncio.create_task(stack.unload(f"digest-{name}")) for name in "abc"]
        await turns(count)
        models, status = await asyncio.gather(list_models(stack), status_of(stack))
        await asyncio.gather(*unloads)

        assert [model.name for model in models] == ["a", "b", "c"]
        names = [worker.model_name for worker in status.workers]
        assert len(names) == len(set(names))
        assert {worker.state for worker in status.workers} <= STATES


@pytest.mark.asyncio
async def test_an_unload_waits_for_no_figures() -> None:
    """Fault 37: with every question for free memory unanswered, models still come and go."""
    async with controller_stack(store=store_of({"a": 10, "b": 10})) as stack:
        await stack.generate("a")
        stack.workers.script.status_gate.clear()
        asking = [asyncio.create_task(status_of(stack)) for _ in range(3)]
        await turns(1)
        await stack.unload("digest-a")
        assert isinstance(stack.model("a").phase, phases.Unloaded)
        assert stack.workers.living == 0
        await asyncio.gather(*asking)
        stack.workers.script.status_gate.set()
        assert await stack.generate("b")


@pytest.mark.asyncio
async def test_many_who_ask_are_told_what_was_said_a_moment_ago() -> None:
    """A worker is asked again only after STATUS_RECENT_S, however often the status is read."""
    async with controller_stack() as stack:
        await stack.generate()
        await status_of(stack)
        stack.workers.script.figures_age_s = 4.0
        stack.clock.now += config.STATUS_RECENT_S / 2
        (worker,) = (await status_of(stack)).workers
        assert worker.figures_age.seconds == 0
        stack.clock.now += config.STATUS_RECENT_S / 2
        (worker,) = (await status_of(stack)).workers
        assert worker.figures_age.seconds == 4


@pytest.mark.asyncio
async def test_the_age_of_figures_is_the_whole_age() -> None:
    """Fault 18: what a worker in a long step tells is old already; the controller adds its part."""
    async with controller_stack() as stack:
        await stack.generate()
        stack.workers.script.figures_age_s = 4.0
        stack.clock.now += config.STATUS_RECENT_S
        await status_of(stack)
        stack.workers.script.status_gate.clear()
        stack.clock.now += 30
        (worker,) = (await status_of(stack)).workers

        assert worker.figures_age.seconds == 34
        stack.workers.script.status_gate.set()
