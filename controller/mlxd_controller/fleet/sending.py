"""Sends a model's files to a node that has them nowhere: from here, or from another node.

Invariants:
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
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, PullInterrupted
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.ops.logs import get_logger

STAGE = "fetching"
"""What a load's progress says while files are copied."""
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
    node: Node, digest: str, path: Path, others: Sequence[Node] = ()
) -> AsyncGenerator[LoadProgress | Sent, None]:
    """Have a node find a model, or copy it there with progress; the last value is its place.

    path: where the model is on the machine that listed it. Its files come from this machine if they
    are here, else from the first of `others` that can give them.

    Raises:
        InvalidModel: the files cannot be read or copied, or the copy is another model.
        MachineShort: the machine lacks what reading them takes.
        PullInterrupted: no machine that can be reached has them.
        PullFailed, StoreFull, InvalidRequest: see NodeFiles.
        NodeLost: the node itself.
    """
    there = await node.find_model(digest, str(path))
    if there is not None:
        yield Sent(there)
        return
    failure: MlxdError | None = None
    async with aclosing(_sources(digest, path, others)) as sources:
        async for opening in sources:
            try:
                source = await _open(opening)
                if source is None:
                    continue
                async with aclosing(_copy(node, digest, source)) as steps:
                    async for step in steps:
                        yield step
            except _SourceFailed as error:
                failure = failure or error.reason
                _log.warning("source failed", digest=digest, node=node.name, reason=str(error))
                continue
            yield Sent(await node.finish_copy(digest))
            return
    problem = f"no machine that can be reached has the files of {path.name} ({digest[:12]})"
    raise failure or PullInterrupted(problem, config.FLEET_SILENT_S)


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
