"""The nodes of a fleet at a controller's start and end: who is taken, replaced, let go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mlxd_controller.fleet.facts import NodeReport
from mlxd_controller.fleet.gathering import gather_fleet
from mlxd_controller.fleet.probe import Fleet
from mlxd_controller.runtime.ports import SystemClock
from mlxd_controller.settings import FleetPlace, ServeSettings, StorePlaces
from mlxd_controller.store.shelves import library_of
from mlxd_shared.domain.errors import InvalidRequest
from tests.fakes.nodes import FixedMembership, NodeInside, ShortMachine
from tests.fakes.workers import FakeLauncher, FakeProcess
from tests.support.fleets import FAKE, HOLDING, LIMIT_S, OPTIONS, follow, nodes_of


class Old(NodeInside):
    """The way to an agent that runs what was installed before an upgrade."""

    async def call(self, method: str, epoch: int, *args: object) -> Any:
        """Answer with another version."""
        answer = await super().call(method, epoch, *args)
        return replace(answer, version="0") if isinstance(answer, NodeReport) else answer


class Reluctant(FakeProcess):
    """A worker whose end takes as long as a test wants."""

    def __init__(self, pid: int, incarnation: str) -> None:
        super().__init__(pid, incarnation)
        self.may_end = asyncio.Event()

    async def close(self) -> int:
        """End when it may."""
        await self.may_end.wait()
        return await super().close()


class ReluctantLauncher(FakeLauncher):
    """Starts one worker of that kind: `slow`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = Reluctant(7, "slow")

    async def launch(self, *, model: str, incarnation: str, device: str = "") -> FakeProcess:
        """Start it where it is asked for."""
        if incarnation == self.slow.incarnation:
            return self.slow
        return await super().launch(model=model, incarnation=incarnation, device=device)


@pytest.mark.asyncio
async def test_a_worker_that_ends_slowly_costs_no_ready_one() -> None:
    """A node is given longer to end what is not adopted than to answer; others report meanwhile."""
    options = replace(OPTIONS, silent_s=1.0)
    async with nodes_of(FAKE, "a", "b") as nodes:
        nodes.machines["a"].workers = launcher = ReluctantLauncher()
        slow = launcher.slow
        async with follow(nodes, options=options) as first:
            for name in ("a", "b"):
                (await first.launch(f"ready-{name}", on=name)).remember(HOLDING)
                await nodes.handles[name].until(
                    lambda way=nodes.handles[name]: "remember" in way.calls  # type: ignore[misc]
                )
            await first.launch("slow")

        async def let_end() -> None:
            way = nodes.handles["b"]
            known = way.calls.count("report")
            await way.until(lambda: way.calls.count("report") >= known + 5)  # over silent_s
            slow.may_end.set()

        letting = asyncio.create_task(let_end())
        async with follow(nodes, epoch=2, options=options) as second:
            await letting
            kept = {kept.worker.incarnation for _, kept in second.kept}
            assert kept == {"ready-a", "ready-b"}
            assert slow.exit_code == 0
            assert all(process.exit_code is None for process, _ in second.kept)


@pytest.mark.asyncio
async def test_a_machine_that_is_short_of_something_keeps_its_workers() -> None:
    """The later controller asks again until there are open files; nothing ready is ended."""
    async with nodes_of(FAKE) as nodes:
        nodes.machines["a"] = machine = ShortMachine()
        nodes.add("a")
        async with follow(nodes, epoch=1) as first:
            (await first.launch("i-1")).remember(HOLDING)
            await nodes.handles["a"].until(lambda: "remember" in nodes.handles["a"].calls)
        machine.refusals = 2
        options = replace(OPTIONS, orphan_grace_s=1e3)
        async with follow(nodes, epoch=2, options=options) as second:
            assert [kept.worker.incarnation for _, kept in second.kept] == ["i-1"]
            assert machine.refusals == 0


@pytest.mark.asyncio
async def test_a_machine_that_stays_short_is_named_with_what_it_lacks() -> None:
    """No controller waits for it longer than for an answer."""
    async with nodes_of(FAKE) as nodes:
        nodes.machines["a"] = machine = ShortMachine(refusals=1 << 30)
        nodes.add("a")
        fleet = Fleet(FixedMembership(nodes.handles), replace(OPTIONS, silent_s=1.0), epoch=1)
        with pytest.raises(InvalidRequest, match="a: the machine lacks "):
            await fleet.muster(start_s=0.0)
        machine.refusals = 0


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_lets_go_what_was_taken() -> None:
    """A node that has joined, and one whose agent still ends what was there."""
    async with nodes_of(FAKE, "a", "b") as nodes:
        nodes.machines["b"].workers = launcher = ReluctantLauncher()
        async with follow(nodes, epoch=1) as first:
            await first.launch("slow", on="b")
        settings = ServeSettings(fleet=FleetPlace("auto"))
        membership, store = FixedMembership(nodes.handles), library_of((), StorePlaces())

        async def start() -> None:
            async with gather_fleet(settings, membership, SystemClock(), store):
                pytest.fail("the start does not end by itself")

        ways, known = nodes.handles, len(nodes.handles["b"].calls)
        starting = asyncio.create_task(start())
        await ways["a"].until(
            lambda: ways["a"].calls[-1] == "report" and "keep" in ways["b"].calls[known:]
        )
        starting.cancel()
        launcher.slow.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert launcher.slow.exit_code == 0
        for name in ("a", "b"):
            assert ways[name].released == 1
            assert nodes.machines[name].closed == 1


@pytest.mark.asyncio
async def test_a_controller_whose_fleet_has_passed_on_gives_up_at_once() -> None:
    """It could wait for ever: a later one has all nodes."""
    async with nodes_of(FAKE, "a") as nodes, follow(nodes, epoch=2):
        fleet = Fleet(FixedMembership(nodes.handles), OPTIONS, epoch=1)
        with pytest.raises(InvalidRequest, match="a later controller has this fleet"):
            await asyncio.wait_for(fleet.muster(start_s=1e6), LIMIT_S)


@pytest.mark.asyncio
async def test_an_agent_of_another_version_is_replaced_once() -> None:
    """It outlives an upgrade; if the new one is of another version too, its machine is."""
    async with nodes_of(FAKE) as nodes:
        old = nodes.handles["a"] = Old(nodes.add("a").agent)
        async with nodes_of(FAKE, "b") as others:
            nodes.handles["b"] = others.handles["b"]
            async with follow(nodes) as seen:
                assert old.released == 1
                assert "0, and this controller" in seen.node("a").reason
                await old.until(lambda: old.calls.count("take") >= 3)
                assert old.released == 1
                fresh = seen.membership.handles["a"] = nodes.add("a")
                await fresh.until(lambda: not seen.node("a").lost)


@pytest.mark.asyncio
async def test_kills_are_counted_on_the_device_s_own_node() -> None:
    """One of another machine clears or blames no prompt here."""
    async with nodes_of(FAKE, "a", "b") as nodes, follow(nodes) as seen:
        for name, count in (("a", 3), ("b", None)):
            seen.node(name).note_oom_kills(count)
        counts = [seen.fleet.count_oom_kills(device) for device in ("a/cpu", "b/cpu", "c/cpu")]
        assert counts == [3, None, None]


@pytest.mark.asyncio
async def test_at_its_end_no_worker_and_no_agent_is_left() -> None:
    """What launchers made is removed as well."""
    async with nodes_of(FAKE, "a", "b") as nodes:
        settings = ServeSettings(fleet=FleetPlace("auto"))
        membership, store = FixedMembership(nodes.handles), library_of((), StorePlaces())
        async with gather_fleet(settings, membership, SystemClock(), store) as fleet:
            launcher = fleet.ports.launcher
            process = await launcher.launch(model="m", incarnation="i-1", device="a/cpu")
        assert await process.wait_exited() == 0
        for name in ("a", "b"):
            assert nodes.handles[name].released == 1
            assert nodes.machines[name].closed == 1


@pytest.mark.asyncio
async def test_a_silent_node_does_not_hold_up_the_end() -> None:
    """It is lost, as it would be while the controller serves; all others are let go."""
    async with nodes_of(FAKE, "a", "b") as nodes, follow(nodes) as seen:
        await asyncio.gather(*(seen.node(name).ask_report({}) for name in ("a", "b")))
        nodes.handles["a"].is_silent = True
        await asyncio.wait_for(seen.fleet.release(limit_s=1.0), LIMIT_S)
        assert seen.node("a").lost
        assert nodes.handles["a"].released == 0
        assert nodes.handles["b"].released == 1
        nodes.handles["a"].mend()
