"""A node as its controller sees it: calls to its agent, its last report, and whether it is lost.

Invariants:
- A call that cannot be made is a loss. Every call on a lost node fails at once, and those under way
  fail in the moment of the loss: no caller waits for a machine that is gone.
- The agent's calls carry this controller's epoch. A node whose agent follows a later controller is
  lost for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from mlxd_controller.fleet.errors import EpochPassed, NodeLost, open_answer
from mlxd_controller.fleet.facts import (
    AgentOptions,
    Ended,
    FileFact,
    Kept,
    Launched,
    NodeReport,
)
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.runtime.ports import Holding, HubOrigin, ModelRef
from mlxd_models.fit.facts import Parts
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.pulls import PullProgress
from mlxd_shared.ops.logs import get_logger

_log = get_logger("fleet")


class NodeHandle(Protocol):
    """The way to one agent, wherever it runs."""

    async def call(self, method: str, epoch: int, *args: object) -> Any:  # noqa: ANN401
        """Return what `NodeAgent.call` does.

        Raises:
            NodeLost: the agent cannot be reached, or has ended.
        """

    async def release(self) -> None:
        """End the agent itself: its controller has stopped, and no worker is left."""


class Node:
    """One node. Starts lost: `take` it first."""

    def __init__(self, name: str, handle: NodeHandle, *, epoch: int, options: AgentOptions) -> None:
        self.name = name
        self.report: NodeReport | None = None
        """Its last report, even of a lost node."""
        self.reason = "it has not answered yet"
        """Why it is lost."""
        self.passed = False
        """Whether its agent follows a later controller."""
        self.hub_problem = ""
        """Why it last got no files from a hub; empty once it did."""
        self._handle = handle
        self._epoch = epoch
        self._options = options
        self._is_taken = False
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gone.set_result(None)

    @property
    def lost(self) -> bool:
        """Whether it cannot be reached."""
        return self._gone.done()

    def replace(self, handle: NodeHandle) -> None:
        """Reach it in another way from now on; if it was reached, it is lost first."""
        if handle is not self._handle:
            self.lose("it has another agent now")
            self._handle = handle

    def lose(self, reason: str) -> None:
        """Fail all calls, now and until it is taken again."""
        if not self.lost:
            _log.error("node lost", node=self.name, reason=reason)
            self._gone.set_result(None)
        self._is_taken = False
        self.reason = reason

    async def take(self) -> tuple[Kept, ...]:
        """Become its controller; return the workers of an earlier one. It stays lost until `join`.

        Raises:
            NodeLost: it cannot be reached. EpochPassed: it follows a later controller.
        """
        kept: tuple[Kept, ...] = await self._open("take", self._options)
        self._is_taken = True
        return kept

    async def join(self, keep: Collection[str] = ()) -> None:
        """End all workers there but those of `keep`, have it report, and count it as reached.

        Raises:
            NodeLost: as `take`.
        """
        await self._open("keep", tuple(keep))
        self.report = await self._open("report", {})
        self._gone = asyncio.get_running_loop().create_future()
        self.reason = ""

    def note_oom_kills(self, count: int | None) -> None:
        """Note a later count of kills for lack of memory than the last report's."""
        if self.report is not None:
            self.report = replace(self.report, oom_kills=count)

    async def ask_report(self, read: Mapping[str, int]) -> NodeReport:
        """Have it report, with the output of workers from these lines on."""
        self.report = report = await self._ask("report", dict(read))
        assert isinstance(report, NodeReport)
        return report

    async def launch(self, model: str, incarnation: str, device: str) -> Launched:
        """Start a worker there."""
        launched = await self._ask("launch", model, incarnation, device)
        assert isinstance(launched, Launched)
        return launched

    async def wait_ended(self, incarnation: str, model: str) -> Ended:
        """Return the end of a worker, once it has come."""
        ended = await self._ask("ended", incarnation, model)
        assert isinstance(ended, Ended)
        return ended

    async def end(self, incarnation: str) -> None:
        """End a worker."""
        await self._ask("end", incarnation)

    async def abandon(self, incarnation: str) -> None:
        """End a worker, or its launch."""
        await self._ask("abandon", incarnation)

    async def remember(self, incarnation: str, holding: Holding | None) -> None:
        """Note what a worker holds."""
        await self._ask("remember", incarnation, holding)

    async def list_models(self) -> tuple[ModelRef, ...]:
        """Return what its own stores have."""
        refs: tuple[ModelRef, ...] = await self._ask("list_models")
        return refs

    async def describe_ranks(self, digest: str) -> Parts:
        """Return what ranks have of a model of its own stores."""
        parts = await self._ask("describe_ranks", digest)
        assert isinstance(parts, Parts)
        return parts

    async def find_model(self, digest: str, path: str) -> str | None:
        """Return where the node itself has a model; None where it has not."""
        path_there: str | None = await self._ask("find_model", digest, path)
        return path_there

    async def pull_model(self, digest: str, origin: HubOrigin) -> PullProgress:
        """Return how far it is with fetching a model from its hub; see AskedDownloads.ask."""
        step: PullProgress = await self._ask("pull_model", digest, origin)
        return step

    async def leave_pull(self, digest: str) -> None:
        """Let it end such a download."""
        await self._ask("leave_pull", digest)

    async def offer_model(self, digest: str, path: str) -> tuple[FileFact, ...] | None:
        """Have it offer a model's files for another node; None where it has not the model."""
        files: tuple[FileFact, ...] | None = await self._ask("offer_model", digest, path)
        return files

    async def read_part(self, digest: str, number: int, offset: int) -> bytes:
        """Return a part of a file that it offers; none at the file's end."""
        part: bytes = await self._ask("read_part", digest, number, offset)
        return part

    async def sum_file(self, digest: str, number: int) -> str:
        """Return the SHA-256 of a file that it offers."""
        sha256: str = await self._ask("sum_file", digest, number)
        return sha256

    async def begin_copy(self, digest: str, files: tuple[FileFact, ...]) -> tuple[int, ...]:
        """Begin or continue a copy; return how many bytes of each file are there."""
        sizes: tuple[int, ...] = await self._ask("begin_copy", digest, files)
        return sizes

    async def write_copy(self, digest: str, number: int, offset: int, chunk: bytes) -> None:
        """Write a part of a file of a copy."""
        await self._ask("write_copy", digest, number, offset, chunk)

    async def check_copy(self, digest: str, number: int, sha256: str) -> None:
        """Have a whole file of a copy compared with its source's SHA-256."""
        await self._ask("check_copy", digest, number, sha256)

    async def finish_copy(self, digest: str) -> str:
        """Return where a whole copy is, once its digest is proved."""
        path: str = await self._ask("finish_copy", digest)
        return path

    async def release(self, *, limit_s: float = config.FLEET_CALL_S) -> None:
        """Let the agent go, also one that was taken and has not joined yet; none that is lost.

        limit_s: one that takes longer is lost.
        """
        if self.lost and not self._is_taken:
            return  # it does not answer, or another controller has it
        try:
            await hear(self._let_go(), limit_s=limit_s)
        except (NodeLost, MlxdError, TimeoutError) as error:
            self.lose(str(error) or f"it was not let go within {limit_s:.0f} s")

    async def _let_go(self) -> None:
        await (self._open if self.lost else self._ask)("release")
        await self._handle.release()

    async def _ask(self, method: str, *args: object) -> Any:  # noqa: ANN401 - of whatever method
        if self.lost:
            raise NodeLost(f"node {self.name} is lost: {self.reason}")
        gone = self._gone
        asking = asyncio.ensure_future(self._open(method, *args))
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
        if asking.cancelled():
            raise NodeLost(f"node {self.name} is lost: {self.reason}")
        return asking.result()

    async def _open(self, method: str, *args: object) -> Any:  # noqa: ANN401 - as above
        try:
            return open_answer(await self._handle.call(method, self._epoch, *args))
        except NodeLost as error:
            if isinstance(error, EpochPassed):
                self.passed = error.held > self._epoch
            # At once: whoever hears of a worker's end must not be sent here for the next one.
            self.lose(str(error))
            raise
