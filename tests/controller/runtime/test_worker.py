"""What the end of a worker says about its work."""

from __future__ import annotations

import pytest

from mlxd_controller.runtime.ports import END_WITH_MACHINE
from mlxd_controller.runtime.worker import Worker
from mlxd_models.fit.planner import plan_load
from mlxd_shared.domain.requests import LoadSpec
from tests.fakes.workers import FakeProcess
from tests.support.model_facts import device, facts


def worker_that_ended(code: int) -> Worker:
    """Return one with a process that ended with this code."""
    process = FakeProcess(1, "i-1")
    process.end(code)
    plan = plan_load(facts(10), LoadSpec(), device(1 << 14))
    return Worker(1, "d", "m", "/m", plan, "i-1", 0.0, process=process)


@pytest.mark.asyncio
async def test_a_lost_machine_is_no_prompt_s_fault() -> None:
    """Its worker counts as killed from outside, though nobody knows the kernel's count there."""
    worker = worker_that_ended(END_WITH_MACHINE)
    assert worker.was_killed(None)
    assert worker.describe_end(END_WITH_MACHINE) == "its machine was lost"
    assert not worker_that_ended(255).was_killed(None)
