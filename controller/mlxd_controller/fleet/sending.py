"""Brings a model's files to a node that has them nowhere: from a hub, from here, or another node.

Invariants:
- The node itself asks the hub, with its own credentials; a hub that gives nothing is told of once
  in the log, until it gives something or has another reason.
- Parts pass through this process one at a time, the next one read while one is written: no node
  listens to another, and none has to be trusted by another.
- A file of a copy counts once its SHA-256 is that of its source, and the copy once its digest is
  the model's.
- A source that fails, or is lost, costs no byte: the next one goes on where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mlxd_controller.fleet.errors import NodeLost
from mlxd_controller.fleet.facts import FileFact
from mlxd_controller.fleet.files import is_there
from mlxd_controller.fleet.node import Node
from mlxd_controller.fleet.offers import offer_of
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.runtime.ports import HubOrigin
from mlxd_shared import config
from mlxd_shared.domain.errors import MachineShort, MlxdError, PullInterrupted, StoreFull
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.pulls import PulledModel
from mlxd_shared.ops.logs import get_logger

STAGE = "fetching"
"""What a load's progress says while files are fetched or copied."""
_T = TypeVar("_T")
_log = get_logger("fleet")


@dataclass(frozen=True, slots=True)
class Sent:
    """A model's place on a node."""

    path: str


class Source(Protocol):
    """The files of one model, on a machine that has them."""

    @property
    def facts(self) -> tuple[FileFact, ...]:
        """The files, in the order of their numbers."""

    def read(self, number: int, offset: int) -> Coroutine[Any, Any, bytes]:
        """Return at most FLEET_CHUNK_BYTES of a file from `offset` on; none at its end.

        Raises:
            MlxdError, NodeLost: it cannot be read.
        """

    def sha256(self, number: int) -> Coroutine[Any, Any, str]:
        """Return a file's SHA-256 in hexadecimal digits; raises as `read`."""


@dataclass(frozen=True, slots=True)
class NodeSource:
    """Implements Source over a node that has the model."""

    node: Node
    digest: str
    facts: tuple[FileFact, ...]

    async def read(self, number: int, offset: int) -> bytes:
        """Return a part of a file; see the port."""
        return await self.node.read_part(self.digest, number, offset)

    async def sha256(self, number: int) -> str:
        """Return a file's sum; see the port."""
        return await self.node.sum_file(self.digest, number)


class _SourceFailed(Exception):
    """A source that cannot give a model's files, and why."""

    def __init__(self, reason: MlxdError) -> None:
        super().__init__(str(reason))
        self.reason = reason


async def send_model(
    node: Node,
    digest: str,
    path: Path,
    others: Sequence[Node] = (),
    *,
    origin: HubOrigin | None = None,
) -> AsyncGenerator[LoadProgress | Sent, None]:
    """Have a node find a model, or bring it there with progress; the last value is its place.

    path: where the model is on the machine that listed it. origin: where the node's hub has it; its
    files are fetched from there, or else come from this machine if they are here, else from the
    first of `others` that can give them.

    Raises:
        InvalidModel: the files cannot be read or copied, or the copy is another model.
        MachineShort: the machine lacks what reading them takes.
        PullInterrupted: no machine that can be reached has them, nor has the hub.
        PullFailed, StoreFull, InvalidRequest: see NodeFiles.
        NodeLost: the node itself.
    """
    there = await node.find_model(digest, str(path))
    if there is not None:
        yield Sent(there)
        return
    failure: MlxdError | None = None
    what = path.name if origin is None else origin.repository
    problem = f"no machine that can be reached has the files of {what} ({digest[:12]})"
    if origin is not None:
        try:
            async with aclosing(_fetch(node, digest, origin)) as steps:
                async for step in steps:
                    yield step
        except _SourceFailed as error:
            problem += f", nor has the hub: {error}"
        else:
            return
    async with aclosing(_sources(digest, path, others)) as sources:
        async for opening in sources:
            try:
                source = await _open(opening)
                if source is None:
                    continue
                async with aclosing(_copy(node, digest, source)) as parts:
                    async for part in parts:
                        yield part
            except _SourceFailed as error:
                failure = failure or error.reason
                _log.warning("source failed", digest=digest, node=node.name, reason=str(error))
                continue
            yield Sent(await node.finish_copy(digest))
            return
    raise failure or PullInterrupted(problem, config.FLEET_SILENT_S)


async def _fetch(
    node: Node, digest: str, origin: HubOrigin
) -> AsyncGenerator[LoadProgress | Sent, None]:
    """Have a node fetch a model from its hub; what is cut off goes on as long as more arrives.

    Raises:
        _SourceFailed: the hub does not give it.
        StoreFull, MachineShort, NodeLost: the node could not take it from elsewhere either.
    """
    pulled: PulledModel | None = None
    done, done_at_cut = 0, -1
    yield LoadProgress(STAGE)
    try:
        while pulled is None:
            try:
                step = await node.pull_model(digest, origin)
            except PullInterrupted:
                if done <= done_at_cut:
                    raise
                done_at_cut = done
                continue
            pulled = step.pulled
            if step.done_nbytes > done:
                done = step.done_nbytes
                yield LoadProgress(STAGE, done, step.total_nbytes)
    except (StoreFull, MachineShort):
        raise
    except MlxdError as error:
        if node.hub_problem != (reason := error.describe()):
            node.hub_problem = reason
            _log.warning("no files from the hub", node=node.name, digest=digest, reason=reason)
        raise _SourceFailed(error) from error
    except (asyncio.CancelledError, GeneratorExit):
        await _leave(node, digest)
        raise
    node.hub_problem = ""
    yield Sent(pulled.path)


async def _leave(node: Node, digest: str) -> None:
    try:
        await hear(node.leave_pull(digest), limit_s=config.FLEET_SILENT_S)
    except (NodeLost, MlxdError, TimeoutError) as error:
        # The node ends it by itself once nobody has asked for a while.
        _log.debug("download not left", node=node.name, reason=str(error))


async def _sources(
    digest: str, path: Path, others: Sequence[Node]
) -> AsyncGenerator[Coroutine[Any, Any, Source | None], None]:
    """Yield what opens each source, in the order in which they are tried.

    Files here go one way instead of two. What lies at the path and is another model comes last: the
    error says what is wrong with it.
    """
    is_here = await asyncio.to_thread(is_there, path, digest)
    if is_here:
        yield offer_of(path)
    for other in others:
        yield _offer_on(other, digest, path)
    if not is_here and await asyncio.to_thread(path.exists):
        yield offer_of(path)


async def _offer_on(node: Node, digest: str, path: Path) -> NodeSource | None:
    facts = await node.offer_model(digest, str(path))
    return None if facts is None else NodeSource(node, digest, facts)


async def _copy(node: Node, digest: str, source: Source) -> AsyncGenerator[LoadProgress, None]:
    """Copy what is not on the node yet, and prove each file.

    Raises:
        _SourceFailed: it is the source that fails.
        MlxdError, NodeLost: it is the node.
    """
    here = await node.begin_copy(digest, source.facts)
    total, done = sum(fact.nbytes for fact in source.facts), sum(here)
    yield LoadProgress(STAGE, done, total)
    for number, begin in enumerate(here):
        offset = begin
        async with aclosing(_parts(source, number, offset)) as parts:
            async for part in parts:
                await node.write_copy(digest, number, offset, part)
                offset += len(part)
                done += len(part)
                yield LoadProgress(STAGE, done, total)
        await node.check_copy(digest, number, await _open(source.sha256(number)))
        yield LoadProgress(STAGE, done, total)


async def _parts(source: Source, number: int, offset: int) -> AsyncGenerator[bytes, None]:
    """Yield a file's bytes from `offset` on, the next part read while its reader has the last."""
    reading = asyncio.create_task(source.read(number, offset))
    try:
        while part := await _open(reading):
            offset += len(part)
            reading = asyncio.create_task(source.read(number, offset))
            yield part
    finally:
        reading.cancel()
        await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()  # retrieved: nobody waits for this part any more


async def _open(answer: Awaitable[_T]) -> _T:
    """Return what a source answers; raise _SourceFailed in place of its errors."""
    try:
        return await answer
    except NodeLost as error:
        reason = PullInterrupted(f"copied from another node: {error}", config.FLEET_SILENT_S)
        raise _SourceFailed(reason) from error
    except MlxdError as error:
        raise _SourceFailed(error) from error
