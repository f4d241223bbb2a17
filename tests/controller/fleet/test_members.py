"""Which nodes are reached: those whose agent can be started, once each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlxd_controller.fleet.errors import NodeLost
from mlxd_controller.fleet.members import Member, Members


class Agent:
    """Implements StartedAgent, by name alone."""

    def __init__(self) -> None:
        self.ended = False

    async def call(self, method: str, epoch: int, *args: object) -> Any:
        """Fail: nobody calls."""
        raise NodeLost(method)

    async def release(self) -> None:
        """End."""
        self.ended = True


class Cluster:
    """What a cluster lists, and the agents that were started there."""

    def __init__(self, *members: Member) -> None:
        self.members = list(members)
        self.broken: set[str] = set()
        self.started: list[str] = []
        self.looking = Members(self.list_members, self.start)

    async def list_members(self) -> Sequence[Member]:
        """Return what the test says."""
        return self.members

    async def start(self, member: Member) -> Agent:
        """Start one, unless the test says otherwise."""
        if member.id in self.broken:
            raise NodeLost("no")
        self.started.append(member.id)
        return Agent()


A, B = Member("1", "a", "10.0.0.1"), Member("2", "b", "10.0.0.2")


@pytest.mark.asyncio
async def test_each_agent_is_started_once() -> None:
    """The same node has the same handle at each look."""
    cluster = Cluster(A, B)
    first = await cluster.looking.look()
    assert await cluster.looking.look() == first
    assert (list(first), cluster.started) == (["a", "b"], ["1", "2"])


@pytest.mark.asyncio
async def test_a_node_whose_agent_cannot_be_started_costs_no_other() -> None:
    """It is left out, and tried again at the next look."""
    cluster = Cluster(A, B)
    cluster.broken.add("1")
    assert list(await cluster.looking.look()) == ["b"]
    cluster.broken.clear()
    assert set(await cluster.looking.look()) == {"a", "b"}


@pytest.mark.asyncio
async def test_an_agent_that_has_ended_is_started_again() -> None:
    """Nothing would ever answer through the old handle."""
    cluster = Cluster(A)
    first = await cluster.looking.look()
    await first["a"].release()
    second = await cluster.looking.look()
    assert second["a"] is not first["a"]
    assert cluster.started == ["1", "1"]


@pytest.mark.asyncio
async def test_a_machine_that_joins_again_has_its_name() -> None:
    """Although its old self is still listed, in whatever order, and has a new agent."""
    cluster = Cluster(A)
    old = await cluster.looking.look()
    cluster.members = [Member("3", "a", "10.0.0.1"), A]
    new = await cluster.looking.look()
    assert new["a"] is not old["a"]
    await old["a"].release()
    assert await cluster.looking.look() == new


@pytest.mark.asyncio
async def test_who_has_gone_is_forgotten() -> None:
    """A cluster whose nodes come and go has no end of ids."""
    cluster = Cluster(A)
    first = await cluster.looking.look()
    cluster.members = []
    assert await cluster.looking.look() == {}
    cluster.members = [A]
    assert (await cluster.looking.look())["a"] is not first["a"]
