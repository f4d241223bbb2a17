"""What ranks have of a model is described once, while others are served."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mlxd_controller.core import phases
from mlxd_controller.runtime.describing import (
    LaterDivision,
    describe_for,
    describe_survivors,
)
from mlxd_controller.runtime.ports import END_WITH_MACHINE, ModelRef
from mlxd_models.fit.facts import Parts
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import LoadSpec, SamplingOptions
from tests.controller.runtime.test_adoption import REF, survivor
from tests.fakes.store import FakeStore
from tests.fakes.workers import FakeWorkers
from tests.support.controller_stack import Stack, controller_stack
from tests.support.divided import Describing
from tests.support.model_facts import device, facts, need_mib
from tests.support.turns import turn_until

PART = 1000
ONE = need_mib(PART, kind="cuda")


def gpu(number: int, room: float = 1.0) -> Device:
    """A GPU with room for so many ranks."""
    return device(int(room * ONE), kind="cuda", name=f"gpu{number}")


def store_of(describing: Describing) -> FakeStore:
    """A model that two GPUs can hold together, and a small one."""
    return FakeStore({"wide": ("wide", describing.facts()), "a": ("a", facts(10))})


def phase_of(stack: Stack, digest: str) -> type[phases.Phase] | None:
    """The phase of a model; None if the scheduler knows none."""
    model = stack.runtime.state.models.get(digest)
    return None if model is None else type(model.phase)


@pytest.mark.asyncio
async def test_others_are_served_while_parts_are_described() -> None:
    """Two requests for one model have it described once, and are served in the end."""
    describing = Describing(PART)
    stack_of = controller_stack(store=store_of(describing), memory=gpu(0), others=(gpu(1),))
    async with stack_of as stack:
        both = [asyncio.create_task(stack.generate("wide")) for _ in range(2)]
        await turn_until(lambda: describing.count > 0)
        await stack.generate("a")
        assert phase_of(stack, "wide") is None
        assert {"wide"} <= stack.runtime.in_use()
        describing.may_end.set()
        for each in both:
            assert await each
        plan = stack.model("wide").plan
        assert plan is not None
        assert plan.devices == ("gpu0", "gpu1")
    assert describing.count == 1


@pytest.mark.asyncio
async def test_who_leaves_meanwhile_is_forgotten() -> None:
    """Nothing is loaded for it, and its model is in use no longer."""
    describing = Describing(PART)
    stack_of = controller_stack(store=store_of(describing), memory=gpu(0), others=(gpu(1),))
    async with stack_of as stack:
        asking = asyncio.create_task(stack.generate("wide"))
        await turn_until(lambda: describing.count > 0)
        asking.cancel()
        await asyncio.wait({asking})
        await turn_until(lambda: not stack.runtime._answers)
        describing.may_end.set()
        await turn_until(lambda: not stack.runtime.in_use())
        await stack.settle()
        assert phase_of(stack, "wide") is None


@pytest.mark.asyncio
async def test_a_loss_waits_for_what_its_replacement_needs() -> None:
    """A queued model whose only device is lost is planned for two others, once described."""
    describing = Describing(PART)
    big, pair = gpu(9, 2.5), (gpu(0), gpu(1))
    big = replace(big, node="x")
    busy = ModelRef("a", "a", (), Path("/models/a"), facts(2 * PART), SamplingOptions())
    stack_of = controller_stack(store=store_of(describing), memory=big, others=pair)
    async with (
        stack_of as stack,
        stack.runtime.lease(busy, keep_alive_s=None, timeout_s=None),
    ):
        asking = asyncio.create_task(stack.generate("wide"))
        await stack.until("wide", phases.Queued)
        assert describing.count == 0
        process = stack.workers.launcher.processes[0]
        stack.probe.device = replace(big, lost=True)
        stack.runtime.measure()
        await turn_until(lambda: describing.count > 0)
        assert stack.runtime.state.models["a"].leases
        process.end(END_WITH_MACHINE)
        describing.may_end.set()
        assert await asking
        assert not stack.runtime.state.models["a"].leases
        plan = stack.model("wide").plan
        assert plan is not None
        assert plan.devices == ("gpu0", "gpu1")


@pytest.mark.asyncio
async def test_what_fails_is_a_problem_of_ranks_alone() -> None:
    """It is tried once by this reading; a plan for one device needs nothing of it."""

    async def fail() -> Parts:
        raise InvalidModel("its files have changed")

    division = LaterDivision(fail)
    model = replace(facts(10), division=division)
    await describe_for(model, LoadSpec())
    await describe_for(model, LoadSpec(ranks=1))
    assert not division.described
    await describe_for(model, LoadSpec(ranks=2))
    assert division.problem == "its files have changed"
    assert model.of_ranks(2) is model


@pytest.mark.asyncio
async def test_workers_of_ranks_have_theirs_described() -> None:
    """Those of one device need nothing."""
    describing = Describing(PART)
    describing.may_end.set()
    ref, workers = replace(REF, facts=describing.facts()), FakeWorkers()
    alone, both = [await survivor(workers, ref, on=name) for name in ("gpu0", "gpu0+gpu1")]
    await describe_survivors([alone])
    assert describing.count == 0
    await describe_survivors([both, both])
    assert describing.count == 1
    for process in workers.launcher.processes:
        await process.close()
