"""An agent by itself: what it answers where its machine refuses, and how that is waited for."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import ClassVar

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


class Watched(int):
    """A process id that notes the threads on which it becomes a name of the system's."""

    threads: ClassVar[set[threading.Thread]] = set()

    def __format__(self, spec: str) -> str:
        self.threads.add(threading.current_thread())
        return super().__format__(spec)


@pytest.mark.asyncio
async def test_ranks_are_looked_up_beside_the_event_loop() -> None:
    """All that a worker of ranks has started counts as the controller's own."""
    machine = FakeMachine()
    agent = NodeAgent("a", "127.0.0.1", machine=machine)
    await agent.call("take", 1, OPTIONS)
    for incarnation, device in (("one", "gpu0"), ("two", "gpu0+gpu1")):
        await agent.call("launch", 1, "m", incarnation, device)
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    machine.workers.processes[1].pid = Watched(os.getpid())
    assert isinstance(await agent.call("report", 1, {}), NodeReport)
    await child.communicate(b"")
    assert {machine.workers.processes[0].pid, os.getpid(), child.pid} <= {*machine.memory.pids}
    assert Watched.threads
    assert threading.current_thread() not in Watched.threads
    await agent.call("release", 1)
