"""The nodes of a fleet, followed: who is there, what each reports, and who is lost.

Invariants:
- A node is lost when a report fails, or FLEET_SILENT_S after its last answer: by our own questions,
  never by the word of the engine that carries them, which comes later.
- In the moment of its loss all its workers end for this controller. It counts as reached again
  only after its agent has ended what was left there.
- Time in which this process could receive no answer counts against no node.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from mlxd_controller.fleet.errors import EpochPassed, NodeLost
from mlxd_controller.fleet.facts import AgentOptions, Kept
from mlxd_controller.fleet.launcher import FleetLauncher, FleetProcess, node_of
from mlxd_controller.fleet.node import Node, NodeHandle
from mlxd_controller.runtime.hearing import hear
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, MachineShort, MlxdError
from mlxd_shared.domain.figures import HostMemory
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity

_log = get_logger("fleet")


class Membership(Protocol):
    """Knows which nodes there are."""

    async def look(self) -> Mapping[str, NodeHandle]:
        """Return the way to each node's agent, by the node's name; an agent is started if need be.

        The same agent has the same handle each time.

        Raises:
            NodeLost: nobody can say now.
        """


class Fleet:
    """The nodes, and the workers on them. One owner: the crew."""

    def __init__(
        self,
        membership: Membership,
        options: AgentOptions,
        *,
        epoch: int,
        security: ChannelSecurity = PLAIN,
    ) -> None:
        """Reach nobody yet. epoch: later controllers have higher ones."""
        self.nodes: dict[str, Node] = {}
        self.launcher = FleetLauncher(self.nodes, security=security)
        self.probe = FleetProbe(self.nodes)
        self._membership = membership
        self._options = options
        self._epoch = epoch
        self._silent_s = options.silent_s
        self._patience_s = max(options.silent_s - config.FLEET_REPORT_INTERVAL_S, 0.0)
        """With a question: its predecessor was answered an interval ago."""
        self._version = importlib.metadata.version("mlxd")
        self._unusable: set[str] = set()
        self._dismissed: set[str] = set()
        """Nodes whose agent was of another version: each is given a new one once."""

    async def muster(self, *, start_s: float) -> list[tuple[FleetProcess, Kept]]:
        """Take the nodes that are there, waiting for a first one; return what lives on them.

        A node that does not answer within the time of silence has nothing of an earlier
        controller's: it joins later. `run` must follow soon: an agent that hears nothing ends its
        workers.

        Raises:
            InvalidRequest: no node came within `start_s`, or a later controller has them all.
        """
        living: list[tuple[FleetProcess, Kept]] = []
        waited = ""
        clock = asyncio.get_running_loop().time
        until_s = clock() + start_s
        while True:
            await self._look()
            living += await self._take_all()
            nodes = self.nodes.values()
            if any(not node.lost for node in nodes):
                return living
            if nodes and all(node.passed for node in nodes):
                break
            if clock() >= until_s:
                waited = f" after {start_s:.0f} s"
                break
            await asyncio.sleep(config.FLEET_REPORT_INTERVAL_S)
        reasons = "; ".join(f"{node.name}: {node.reason}" for node in self.nodes.values())
        problem = f"no node can be used{waited}: {reasons or 'none is there'}"
        raise InvalidRequest.of("fleet", problem)

    async def _take_all(self) -> list[tuple[FleetProcess, Kept]]:
        """Take all nodes. Those that are taken are followed meanwhile: no agent hears nothing."""
        following: list[asyncio.Task[None]] = []

        async def take(node: Node) -> list[tuple[FleetProcess, Kept]]:
            workers = await self._take(node)
            if not node.lost:
                following.append(asyncio.create_task(self._follow(node)))
            return workers

        try:
            taken = await asyncio.gather(*map(take, self.nodes.values()))
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
        return [worker for workers in taken for worker in workers]

    async def _take(self, node: Node) -> list[tuple[FleetProcess, Kept]]:
        """Take a node; what it may keep is kept also if the end of all else takes long."""
        limit_s = self._silent_s
        try:
            kept = await self._take_patiently(node)
            limit_s = config.FLEET_TAKE_S
            keep = [each.worker.incarnation for each in kept]
            await hear(self._join(node, keep=keep), limit_s=limit_s)
        except (NodeLost, MlxdError, TimeoutError) as error:
            self._say_unusable(node, _reason(error, limit_s))
            return []
        return [(self.launcher.adopt(node, each.holding.name, each.worker), each) for each in kept]

    async def _take_patiently(self, node: Node) -> tuple[Kept, ...]:
        """Take a node, again and again while it is short of something.

        It has answered: what lives there is not to be ended for that.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._silent_s
        while True:
            try:
                return await hear(node.take(), limit_s=self._silent_s)
            except MachineShort:
                if clock() >= until_s:
                    raise
            await asyncio.sleep(config.FLEET_REPORT_INTERVAL_S)

    async def run(self) -> None:
        """Follow all nodes, also those that come later, until cancelled."""
        following: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                for node in self.nodes.values():
                    if node.name not in following:
                        following[node.name] = tasks.create_task(self._follow(node))
                await asyncio.sleep(config.FLEET_LOOK_INTERVAL_S)
                await self._look()

    async def release(self, *, limit_s: float = config.FLEET_CALL_S) -> None:
        """Let all agents go, when the controller stops; takes no longer than `limit_s`."""
        await asyncio.gather(*(node.release(limit_s=limit_s) for node in self.nodes.values()))

    def count_oom_kills(self, device: str) -> int | None:
        """Return the kills for lack of memory on a device's node; None where it cannot say."""
        node = self.nodes.get(node_of(device))
        return None if node is None or node.report is None else node.report.oom_kills

    async def _look(self) -> None:
        try:
            handles = await hear(self._membership.look(), limit_s=config.FLEET_TAKE_S)
        except (NodeLost, TimeoutError) as error:
            reason = _reason(error, config.FLEET_TAKE_S)
            _log.warning("cannot look for nodes", reason=reason)
            return
        for name, handle in handles.items():
            node = self.nodes.get(name)
            if node is not None:
                node.replace(handle)
            elif len(self.nodes) < config.FLEET_NODES_MAX:
                _log.info("node found", node=name)
                self.nodes[name] = Node(name, handle, epoch=self._epoch, options=self._options)
            else:
                limit = f"over {config.FLEET_NODES_MAX} nodes"
                _log.error("node not used", node=name, reason=limit)

    async def _follow(self, node: Node) -> None:
        while not node.passed:
            was_lost = node.lost
            try:
                if was_lost:
                    await hear(self._return(node), limit_s=config.FLEET_TAKE_S)
                else:
                    await hear(self._ask(node), limit_s=self._patience_s)
            except (NodeLost, MlxdError, TimeoutError) as error:
                if was_lost:
                    self._say_unusable(node, _reason(error, config.FLEET_TAKE_S))
                else:
                    node.lose(_reason(error, self._silent_s))
                    self._unusable.add(node.name)
            await asyncio.sleep(config.FLEET_REPORT_INTERVAL_S)

    async def _return(self, node: Node) -> None:
        await node.take()
        await self._join(node)

    async def _join(self, node: Node, *, keep: Collection[str] = ()) -> None:
        await node.join(keep)
        assert node.report is not None
        if node.report.version != self._version:
            problem = f"it has mlxd {node.report.version}, and this controller {self._version}"
            if node.name not in self._dismissed:
                # An agent outlives an upgrade of what it was started from: a new one has that.
                self._dismissed.add(node.name)
                await node.release()
            node.lose(problem)
            raise NodeLost(problem)
        self._unusable.discard(node.name)
        devices = [device.name for device in node.report.devices]
        _log.info("node joined", node=node.name, devices=devices)

    async def _ask(self, node: Node) -> None:
        own = {k: p for k, p in self.launcher.processes.items() if p.node is node}
        report = await node.ask_report({k: process.read for k, process in own.items()})
        for output in report.output:
            own[output.incarnation].note_output(output)

    def _say_unusable(self, node: Node, reason: str) -> None:
        node.lose(reason)
        if node.name not in self._unusable:
            self._unusable.add(node.name)
            _log.warning("node cannot be used", node=node.name, reason=reason)


class FleetProbe:
    """Implements ports.DeviceProbe from the nodes' last reports; never waits."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:  # noqa: ARG002 - agents know
        """Return all devices, by their nodes' names; those of a lost node are lost."""
        return tuple(
            replace(device, lost=node.lost)
            for _, node in sorted(self._nodes.items())
            if node.report is not None
            for device in node.report.devices
        )

    def machines(self) -> tuple[HostMemory, ...]:
        """Return the nodes' memory; see the port."""
        return tuple(
            replace(node.report.memory, lost=node.lost)
            for _, node in sorted(self._nodes.items())
            if node.report is not None
        )


def _reason(error: Exception, limit_s: float) -> str:
    if isinstance(error, EpochPassed):
        return f"{error}: a later controller has this fleet" if error.held else str(error)
    return str(error) or f"no answer for {limit_s:.0f} s"
