"""An agent by itself: what it answers where its machine refuses, and how that is waited for."""

from __future__ import annotations

import pytest

from mlxd_controller.fleet.agent import NodeAgent
from mlxd_controller.fleet.errors import Failed
from mlxd_controller.fleet.facts import NodeReport
from tests.fakes.nodes import FakeMachine, ShortMachine
from tests.support.fleets import OPTIONS
from tests.support.no_more_files import no_more_files


@pytest.mark.asyncio
async def test_a_machine_without_open_files_reports_what_was_measured_last() -> None:
    """No report fails for that: a node whose report fails is lost with all its workers."""
    agent = NodeAgent("a", "127.0.0.1", machine=FakeMachine())
    await agent.call("take", 1, OPTIONS)
    before = await agent.call("report", 1, {})
    assert isinstance(before, NodeReport)
    with no_more_files():
        assert await agent.call("report", 1, {}) == before
    await agent.call("release", 1)


@pytest.mark.asyncio
async def test_what_the_system_refuses_is_an_answer() -> None:
    """The agent follows the controller that has asked, which asks again."""
    machine = ShortMachine(refusals=1)
    agent = NodeAgent("a", "127.0.0.1", machine=machine)
    answer = await agent.call("take", 1, OPTIONS)
    assert isinstance(answer, Failed)
    assert answer.kind == "MachineShort"
    assert dict(answer.fields)["doing"].startswith("take on node a: ")
    assert await agent.call("take", 1, OPTIONS) == ()
    assert isinstance(await agent.call("report", 1, {}), NodeReport)
    await agent.call("release", 1)


@pytest.mark.asyncio
async def test_what_was_never_measured_is_an_error_with_a_name() -> None:
    """There are no figures to report in its place."""
    agent = NodeAgent("a", "127.0.0.1", machine=FakeMachine())
    await agent.call("take", 1, OPTIONS)
    with no_more_files():
        answer = await agent.call("report", 1, {})
    assert isinstance(answer, Failed)
    assert answer.kind == "MachineShort"
    await agent.call("release", 1)
