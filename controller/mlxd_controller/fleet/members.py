"""Which nodes a cluster has, and the way to an agent on each, whatever engine starts them.

Invariants:
- The agent of a node is started once, and again only where it has ended for good.
- A node whose agent cannot be started is left out; all others are reached nevertheless.
- Of two nodes with one name the one counts that was first seen later: a machine that joins again
  has its old name, and for a while its old self is still listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxd_controller.fleet.errors import NodeLost
from mlxd_controller.fleet.node import NodeHandle
from mlxd_shared.ops.logs import get_logger

_log = get_logger("fleet")


@dataclass(frozen=True, slots=True)
class Member:
    """A living node of the cluster: its id, which no other ever has, and what it is called."""

    id: str
    name: str
    address: str


class StartedAgent(NodeHandle, Protocol):
    """The way to an agent that somebody started."""

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""


class Members:
    """Implements Membership."""

    def __init__(
        self,
        list_members: Callable[[], Awaitable[Sequence[Member]]],
        start: Callable[[Member], Awaitable[StartedAgent]],
    ) -> None:
        """Ask `list_members` at each look; both functions raise NodeLost where they cannot."""
        self._list_members = list_members
        self._start = start
        self._agents: dict[str, StartedAgent] = {}
        self._seen: dict[str, None] = {}
        self._failed: set[str] = set()

    async def look(self) -> Mapping[str, NodeHandle]:
        """Return the living nodes with an agent; see the port."""
        members = {member.id: member for member in await self._list_members()}
        self._agents = {k: a for k, a in self._agents.items() if k in members and not a.ended}
        self._seen = {k: None for k in (*self._seen, *members) if k in members}
        self._failed &= members.keys()
        fresh = [member for member in members.values() if member.id not in self._agents]
        await asyncio.gather(*map(self._begin, fresh))
        order = (members[id_] for id_ in self._seen if id_ in self._agents)
        return {member.name: self._agents[member.id] for member in order}

    async def _begin(self, member: Member) -> None:
        try:
            self._agents[member.id] = await self._start(member)
        except NodeLost as error:
            if member.id not in self._failed:
                self._failed.add(member.id)
                _log.warning("no agent can be started", node=member.name, reason=str(error))
        else:
            self._failed.discard(member.id)
