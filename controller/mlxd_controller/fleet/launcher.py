"""Workers on nodes behind the launcher's port: started, watched and ended by the nodes' agents.

Invariants:
- A worker's end has one of four sources: its agent's word, the loss of its node, the agent's having
  no such worker, or an end that takes longer than FLEET_CALL_S. So it always comes, with a code.
- A launch that its caller gives up leaves nothing on the node: `abandon` follows it there.
- A fleet worker gives its controller no proof: that would travel through somebody else's engine,
  and the worker would believe whoever has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from mlxd_controller.fleet.errors import NodeLost
from mlxd_controller.fleet.facts import Ended, Launched, Lines
from mlxd_controller.fleet.node import Node
from mlxd_controller.fleet.sending import Sent, send_model
from mlxd_controller.launcher.process import END_UNKNOWN, EndingProcess
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.runtime.ports import END_WITH_MACHINE, Holding, HubOrigin, ModelRef
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, WorkerStartFailed
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity
from mlxd_shared.wire.proof import Proof

_log = get_logger("fleet")


class FleetProcess(EndingProcess):
    """Implements ports.WorkerProcess for a worker on a node; `pid` is of that machine."""

    proof: Proof | None = None

    def __init__(
        self, node: Node, model: str, launched: Launched, ended: Callable[[str], None]
    ) -> None:
        """Watch the worker from now on; `ended` is called with its incarnation at its end."""
        super().__init__(launched.incarnation, asyncio.create_task(self._follow()))
        self._ended.add_done_callback(lambda _: ended(launched.incarnation))
        self.pid = launched.pid
        self.address = launched.address
        self.node = node
        self.read = 0
        """The number of the next line of its output."""
        self._model = model
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding: Holding | None = None
        self._sending: asyncio.Task[None] | None = None

    def remember(self, holding: Holding | None) -> None:
        """Have the agent note it; the latest word is the one that counts."""
        self._holding = holding
        if self.exit_code is None and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send())

    def note_output(self, output: Lines) -> None:
        """Keep the lines that are new."""
        new = max(output.end - self.read, 0)
        for line in output.lines[max(len(output.lines) - new, 0) :]:
            self.output.add(line)
        self.read = max(self.read, output.end)

    async def _send(self) -> None:
        sent: Holding | None = None
        first = True
        while first or sent is not self._holding:
            first, sent = False, self._holding
            try:
                await self.node.remember(self.incarnation, sent)
            except (NodeLost, MlxdError) as error:
                _log.debug("not remembered", node=self.node.name, reason=str(error))

    async def _follow(self) -> int:
        try:
            return await self._wait_end()
        finally:
            if self._sending is not None:
                self._sending.cancel()
                await asyncio.wait({self._sending})

    async def _wait_end(self) -> int:
        asking: asyncio.Future[Ended] = asyncio.create_task(
            self.node.wait_ended(self.incarnation, self._model)
        )
        try:
            either: set[asyncio.Future[Any]] = {asking, self._given_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
        if asking.cancelled():
            return END_UNKNOWN
        try:
            end = asking.result()
        except NodeLost:
            self.output.add(f"node {self.node.name} is lost: {self.node.reason}")
            return END_WITH_MACHINE
        except MlxdError as error:
            self.output.add(error.describe())
            return END_UNKNOWN
        self.note_output(end.output)
        self.node.note_oom_kills(end.oom_kills)
        return end.code

    async def _close(self) -> int:
        try:
            return await hear(self._have_ended(), limit_s=config.FLEET_CALL_S)
        except (NodeLost, MlxdError, TimeoutError) as error:
            reason = str(error) or f"no answer for {config.FLEET_CALL_S:.0f} s"
            _log.warning("worker cannot be ended", node=self.node.name, reason=reason)
        if not self._given_up.done():
            self._given_up.set_result(None)
        return await self.wait_exited()

    async def _have_ended(self) -> int:
        await self.node.end(self.incarnation)
        return await self.wait_exited()


def node_of(device: str) -> str:
    """Return the name of a device's node: devices are called NODE/DEVICE."""
    return device.partition("/")[0]


class FleetLauncher:
    """Implements ports.Launcher over `nodes`, which somebody else keeps."""

    def __init__(self, nodes: dict[str, Node], *, security: ChannelSecurity = PLAIN) -> None:
        self.processes: dict[str, FleetProcess] = {}
        """The living ones, by incarnation."""
        self.find_known: Callable[[str], ModelRef | None] = lambda _: None
        """Returns the model with a digest; what it says of a hub is where nodes fetch it first."""
        self._nodes = nodes
        self._security = security

    def adopt(self, node: Node, model: str, launched: Launched) -> FleetProcess:
        """Watch a worker that runs already."""
        process = FleetProcess(node, model, launched, self._drop)
        self.processes[launched.incarnation] = process
        return process

    async def launch(self, *, model: str, incarnation: str, device: str = "") -> FleetProcess:
        """Start a worker on the device's node; see the port."""
        node = self._nodes.get(node_of(device))
        if node is None:
            raise WorkerStartFailed(model, (f"no node has the device {device!r}",))
        try:
            launched = await node.launch(model, incarnation, device)
        except NodeLost as error:
            raise WorkerStartFailed(model, (str(error),)) from error
        except asyncio.CancelledError:
            await self._abandon(node, incarnation)
            raise
        return self.adopt(node, model, launched)

    def connect(
        self,
        *,
        address: str,
        incarnation: str,
        digest: str,
        proof: Proof | None = None,  # noqa: ARG002 - a fleet worker gives none
    ) -> FleetLink:
        """Implements ports.Connect for a process that `launch` or `adopt` returned."""
        process = self.processes.get(incarnation)
        node = None if process is None else process.node

        def list_others() -> list[Node]:
            named = sorted(self._nodes.items())
            return [other for _, other in named if other is not node and not other.lost]

        ref = self.find_known(digest)
        return FleetLink(
            node,
            list_others,
            origin=None if ref is None else ref.origin,
            address=address,
            incarnation=incarnation,
            digest=digest,
            security=self._security,
        )

    async def _abandon(self, node: Node, incarnation: str) -> None:
        try:
            await hear(node.abandon(incarnation), limit_s=config.FLEET_CALL_S)
        except (NodeLost, MlxdError, TimeoutError) as error:
            # Whatever is there ends when the node is taken again.
            reason = str(error) or f"no answer for {config.FLEET_CALL_S:.0f} s"
            _log.warning("launch not given up", node=node.name, reason=reason)

    def _drop(self, incarnation: str) -> None:
        self.processes.pop(incarnation, None)


class FleetLink(GrpcLink):
    """The link to a worker on a node: a load has the model's files found or brought there first."""

    def __init__(
        self,
        node: Node | None,
        list_others: Callable[[], Sequence[Node]],
        *,
        origin: HubOrigin | None,
        address: str,
        incarnation: str,
        digest: str,
        security: ChannelSecurity,
    ) -> None:
        """node: where the worker runs; None if it has ended already.

        list_others: returns the nodes from which files may come. origin: where a hub has them.
        """
        super().__init__(address=address, incarnation=incarnation, digest=digest, security=security)
        self._node = node
        self._list_others = list_others
        self._origin = origin

    async def load(
        self, name: str, path: str, spec: LoadSpec
    ) -> AsyncGenerator[LoadProgress, None]:
        """Load and yield the progress, "fetching" first where files have to come; see the port."""
        if self._node is None:
            raise WorkerStartFailed(name, ("its worker has ended",))
        there = ""
        sending = send_model(
            self._node, self._digest, Path(path), self._list_others(), origin=self._origin
        )
        try:
            async with aclosing(sending) as steps:
                async for step in steps:
                    if isinstance(step, Sent):
                        there = step.path
                    else:
                        yield step
        except NodeLost as error:
            raise WorkerStartFailed(name, (str(error),)) from error
        async with aclosing(super().load(name, there, spec)) as loading:
            async for progress in loading:
                yield progress
