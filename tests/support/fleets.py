"""A fleet in this process: followed nodes, whose workers are fake ones or real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlxd_controller.fleet.agent import NodeAgent
from mlxd_controller.fleet.facts import AgentOptions, Kept
from mlxd_controller.fleet.files import NodeFiles
from mlxd_controller.fleet.launcher import FleetProcess
from mlxd_controller.fleet.node import Node
from mlxd_controller.fleet.probe import Fleet
from mlxd_controller.pulling.room import FreeOf, free_nbytes
from mlxd_controller.runtime.ports import Holding, ModelRef
from mlxd_controller.settings import Limits, StorePlaces
from mlxd_models.fit.plan import Device
from mlxd_shared.domain.requests import LoadSpec
from tests.fakes.nodes import FakeMachine, FixedMembership, NodeInside

FAKE, REAL = "fake", "real"
OPTIONS = AgentOptions(Limits(), stall_timeout_s=60.0, orphan_grace_s=60.0, silent_s=60.0)
HOLDING = Holding("d" * 64, "m", "/m", LoadSpec(), 1.0)
LIMIT_S = 60.0


class Blind(NodeFiles):
    """A machine that does not see the controller's disk, and has no stores but those of a test."""

    def __init__(
        self,
        folder: Path,
        own: Path | None = None,
        *,
        hub: Path | None = None,
        free_of: FreeOf = free_nbytes,
    ) -> None:
        """Keep copies in `folder`; models lie in `own`, and in the hub's cache `hub`."""
        self._places = StorePlaces(models_dir=own, hub_cache=hub)
        super().__init__(folder, free_of=free_of)

    @property
    def stores(self) -> StorePlaces:
        """The test's, whatever a controller says: its paths are another machine's."""
        return self._places

    @stores.setter
    def stores(self, places: StorePlaces) -> None:
        pass

    async def list_models(self) -> tuple[ModelRef, ...]:
        """Name paths that are on no other machine."""
        refs = await super().list_models()
        return tuple(replace(ref, path=Path("/elsewhere", *ref.path.parts[1:])) for ref in refs)

    async def find(self, digest: str, path: str) -> str | None:
        """Look at another path than the one that was named."""
        return await super().find(digest, "/nowhere")


@dataclass(slots=True)
class Nodes:
    """Agents that outlive a controller, by their names, and the ways to them."""

    kind: str
    handles: dict[str, NodeInside] = field(default_factory=dict)
    machines: dict[str, FakeMachine] = field(default_factory=dict)
    files: dict[str, NodeFiles] = field(default_factory=dict)
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    """What says which hub a node asks, and as whom, by the node's name."""

    def add(self, name: str) -> NodeInside:
        """Add a node with a fresh agent; one of that name is replaced."""
        fake = self.machines.setdefault(name, FakeMachine()) if self.kind == FAKE else None
        agent = NodeAgent(
            name,
            "127.0.0.1",
            machine=fake,
            files=self.files.get(name),
            environment=self.environments.get(name),
        )
        self.handles[name] = NodeInside(agent)
        return self.handles[name]


@dataclass(slots=True)
class Followed:
    """A controller's view of the nodes, and what it was offered for adoption."""

    fleet: Fleet
    nodes: Nodes
    membership: FixedMembership
    kept: list[tuple[FleetProcess, Kept]]

    def node(self, name: str) -> Node:
        """Return a node as the controller sees it."""
        return self.fleet.nodes[name]

    def device(self, name: str) -> Device:
        """Return the one device of a node."""
        (device,) = [d for d in self.fleet.probe.read(()) if d.node == name]
        return device

    async def launch(self, incarnation: str, *, on: str = "a") -> FleetProcess:
        """Start a worker on a node."""
        return await self.fleet.launcher.launch(
            model="m", incarnation=incarnation, device=self.device(on).name
        )


@asynccontextmanager
async def nodes_of(kind: str, *names: str) -> AsyncIterator[Nodes]:
    """Have nodes around the body; at its end nothing runs on them."""
    nodes = Nodes(kind)
    for name in names:
        nodes.add(name)
    last = 1 << 62
    try:
        yield nodes
    finally:
        for handle in nodes.handles.values():
            await handle.agent.call("take", last, OPTIONS)
            await handle.agent.call("release", last)


@asynccontextmanager
async def follow(
    nodes: Nodes,
    *,
    epoch: int = 1,
    options: AgentOptions = OPTIONS,
) -> AsyncIterator[Followed]:
    """Have a controller follow the nodes around the body; then it is gone without a word."""
    membership = FixedMembership(nodes.handles)
    fleet = Fleet(membership, options, epoch=epoch)
    kept = await fleet.muster(start_s=LIMIT_S)
    following = asyncio.create_task(fleet.run())
    try:
        yield Followed(fleet, nodes, membership, kept)
    finally:
        following.cancel()
        await asyncio.wait({following})
        assert following.cancelled()
        for node in fleet.nodes.values():
            node.lose("the controller is gone")
        await asyncio.gather(*(p.wait_exited() for p in [*fleet.launcher.processes.values()]))
