"""What a fleet must do, over fake workers and over real ones alike; agents are real in both."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from dataclasses import replace

import psutil
import pytest

from mlxd_controller.fleet.errors import EpochPassed, Failed, NodeLost
from mlxd_controller.fleet.launcher import FleetProcess
from mlxd_controller.runtime.ports import END_WITH_MACHINE
from mlxd_shared.domain.errors import WorkerStartFailed
from mlxd_shared.ops.known_process import KnownProcess, mark_of
from tests.support.fleets import FAKE, HOLDING, LIMIT_S, OPTIONS, REAL, Nodes, follow, nodes_of

KINDS = (FAKE, REAL)


def kill(nodes: Nodes, process: FleetProcess, node: str = "a") -> None:
    """Have a worker die of SIGKILL."""
    if nodes.kind == FAKE:
        (fake,) = [w for w in nodes.machines[node].workers.processes if w.pid == process.pid]
        fake.end(-signal.SIGKILL)
    else:
        os.kill(process.pid, signal.SIGKILL)


def lives(nodes: Nodes, process: FleetProcess, node: str = "a") -> bool:
    """Whether the worker itself lives, whatever its controller believes."""
    if nodes.kind == FAKE:
        (fake,) = [w for w in nodes.machines[node].workers.processes if w.pid == process.pid]
        return fake.exit_code is None
    return psutil.pid_exists(process.pid)


def end_of(nodes: Nodes, process: FleetProcess, node: str = "a") -> Awaitable[object]:
    """Return what waits for the end of a worker that lives."""
    if nodes.kind == FAKE:
        (fake,) = [w for w in nodes.machines[node].workers.processes if w.pid == process.pid]
        return fake.wait_exited()
    mark, ended = mark_of(process.pid), asyncio.Event()
    assert mark is not None
    KnownProcess(mark).watch(ended.set)
    return ended.wait()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_runs_on_the_node_of_its_device(kind: str) -> None:
    """Each node's device has the node's name, and its launcher alone starts what is for it."""
    async with nodes_of(kind, "a", "b") as nodes, follow(nodes) as seen:
        assert [device.name for device in seen.fleet.probe.read(())] == ["a/cpu", "b/cpu"]
        assert [machine.machine for machine in seen.fleet.probe.machines()] == ["a", "b"]
        process = await seen.launch("i-1", on="b")
        assert (process.node.name, process.incarnation) == ("b", "i-1")
        assert process.exit_code is None
        assert process.address
        assert await process.close() == 0
        assert not seen.fleet.launcher.processes


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_the_end_of_a_worker_is_reported_with_its_code(kind: str) -> None:
    """A signal is told as one, as it is of a worker on this machine."""
    async with nodes_of(kind, "a") as nodes, follow(nodes) as seen:
        process = await seen.launch("i-1")
        kill(nodes, process)
        assert await asyncio.wait_for(process.wait_exited(), LIMIT_S) == -signal.SIGKILL


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["cut", "silent"])
async def test_all_workers_of_a_lost_node_end_at_once(kind: str, how: str) -> None:
    """Cut off or silent: workers, launches and closes end; the device is lost, others go on."""
    options = replace(OPTIONS, silent_s=1.0)
    async with nodes_of(kind, "a", "b") as nodes, follow(nodes, options=options) as seen:
        first, other = await seen.launch("i-1"), await seen.launch("i-2", on="b")
        if how == "cut":
            nodes.handles["a"].cut()
        else:
            nodes.handles["a"].is_silent = True

        closing = asyncio.create_task(first.close())
        assert await asyncio.wait_for(first.wait_exited(), LIMIT_S) == END_WITH_MACHINE
        assert await closing == END_WITH_MACHINE
        assert seen.device("a").lost
        assert not seen.device("b").lost
        assert other.exit_code is None
        assert "lost" in first.last_lines()[-1]
        with pytest.raises(WorkerStartFailed):
            await seen.launch("i-3")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_comes_back_is_empty(kind: str) -> None:
    """What lived there, and ended for its controller, is really ended before it counts again."""
    async with nodes_of(kind, "a") as nodes, follow(nodes) as seen:
        process = await seen.launch("i-1")
        nodes.handles["a"].cut()
        assert await asyncio.wait_for(process.wait_exited(), LIMIT_S) == END_WITH_MACHINE
        assert lives(nodes, process)

        nodes.handles["a"].mend()
        await nodes.handles["a"].until(lambda: not seen.device("a").lost)
        assert not lives(nodes, process)
        assert await (await seen.launch("i-2")).close() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_with_another_agent_joins_again(kind: str) -> None:
    """A machine that restarted has a fresh agent: the old one's workers have ended."""
    async with nodes_of(kind, "a") as nodes, follow(nodes) as seen:
        process = await seen.launch("i-1")
        old = nodes.handles["a"]
        fresh = nodes.add("a")
        seen.membership.handles["a"] = fresh
        assert await asyncio.wait_for(process.wait_exited(), LIMIT_S) == END_WITH_MACHINE
        await fresh.until(lambda: not seen.device("a").lost)
        assert await (await seen.launch("i-2")).close() == 0
        await old.agent.call("keep", 1, ())


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_later_controller_takes_over_what_is_ready(kind: str) -> None:
    """It is offered the workers that hold a model, still running; all others are ended."""
    async with nodes_of(kind, "a") as nodes:
        async with follow(nodes, epoch=1) as first:
            ready, idle = await first.launch("i-1"), await first.launch("i-2")
            ready.remember(HOLDING)
            await nodes.handles["a"].until(lambda: "remember" in nodes.handles["a"].calls)
        options = replace(OPTIONS, orphan_grace_s=1e3)  # of the agent, not of its workers
        async with follow(nodes, epoch=2, options=options) as second:
            ((process, kept),) = second.kept
            assert (process.incarnation, kept.holding) == ("i-1", HOLDING)
            assert process.pid == ready.pid
            assert lives(nodes, process)
            assert not lives(nodes, idle)
            assert await process.close() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_an_earlier_controller_is_refused(kind: str) -> None:
    """Two controllers of one fleet: the later one has it, the other loses every node for good."""
    async with nodes_of(kind, "a") as nodes, follow(nodes, epoch=1) as first:
        process = await first.launch("i-1")
        process.remember(HOLDING)
        await nodes.handles["a"].until(lambda: "remember" in nodes.handles["a"].calls)
        async with follow(nodes, epoch=2) as second:
            assert await asyncio.wait_for(process.wait_exited(), LIMIT_S) == END_WITH_MACHINE
            await nodes.handles["a"].until(lambda: first.device("a").lost)
            assert first.node("a").passed
            with pytest.raises(NodeLost):
                await first.node("a").launch("m", "i-3", "a/cpu")
            with pytest.raises(EpochPassed):
                await first.node("a").take()
            assert await (await second.launch("i-4")).close() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_controller_that_is_gone_leaves_nothing_for_ever(kind: str) -> None:
    """An agent that hears nothing for the grace ends its workers by itself."""
    async with nodes_of(kind, "a") as nodes:
        options = replace(OPTIONS, orphan_grace_s=0.0, silent_s=3.0)
        async with follow(nodes, options=options) as seen:
            process = await seen.launch("i-1")
            process.remember(HOLDING)
            gone = end_of(nodes, process)
        await asyncio.wait_for(gone, LIMIT_S)
        assert not lives(nodes, process)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_that_nobody_has_taken_refuses(kind: str) -> None:
    """A fresh agent does nothing for a controller that has not said how."""
    async with nodes_of(kind, "a") as nodes:
        answer = await nodes.handles["a"].agent.call("report", 1, {})
        assert answer == Failed("EpochPassed", (("node", "a"), ("held", 0)))


@pytest.mark.asyncio
async def test_a_launch_that_is_given_up_leaves_nothing_on_the_node() -> None:
    """Its caller's cancellation goes after it, and returns only once the worker has ended."""
    async with nodes_of(FAKE, "a") as nodes, follow(nodes) as seen:
        workers = nodes.machines["a"].workers
        workers.gate.clear()
        launching = asyncio.create_task(seen.launch("i-1"))
        await nodes.handles["a"].until(lambda: bool(workers.processes))
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        assert workers.given_up == 1
        assert [worker.exit_code for worker in workers.processes] == [0]
