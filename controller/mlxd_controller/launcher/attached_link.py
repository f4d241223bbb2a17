"""The link to a worker that was started elsewhere.

A load takes the place of what is there, and the end of its use is not the end of its process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from mlxd_controller.runtime.ports import (
    LoadOrder,
    Question,
    RawStream,
    WorkerLink,
    WorkerProcess,
)
from mlxd_shared.domain.errors import InvalidRequest, ModelDraining, WrongWorker
from mlxd_shared.domain.figures import LoadProgress, ProcessStatus
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.proof import Checked

UNLOAD_TIMEOUT_S = 30.0
_log = get_logger("attached")


class AttachedLink:
    """Implements ports.WorkerLink over another link, for as long as `process` is used."""

    def __init__(self, link: WorkerLink, process: WorkerProcess) -> None:
        """Own `link`."""
        self._link = link
        self._process = process

    async def load(self, order: LoadOrder) -> AsyncGenerator[LoadProgress, None]:
        """Load and yield the progress; what is loaded otherwise is unloaded first.

        A model that is loaded as ordered is found and stays: the one step is "ready".
        """
        try:
            async with aclosing(self._link.load(order)) as steps:
                async for step in steps:
                    yield step
        except (InvalidRequest, ModelDraining, WrongWorker) as error:
            # Said before the first step: the worker holds another model, or this one otherwise.
            _log.info("making room in the worker", model=order.name, reason=error.describe())
        else:
            return
        await self._link.unload(timeout_s=UNLOAD_TIMEOUT_S)
        async with aclosing(self._link.load(order)) as steps:
            async for step in steps:
                yield step

    def generate(self, request: Checked, *, timeout_s: float | None) -> RawStream:
        """Start a Generate; see the port."""
        return self._link.generate(request, timeout_s=timeout_s)

    async def ask(self, question: Question, request: Checked, *, timeout_s: float | None) -> bytes:
        """Have the worker answer; see the port."""
        return await self._link.ask(question, request, timeout_s=timeout_s)

    async def status(self, *, timeout_s: float) -> ProcessStatus:
        """Return what the worker says of itself."""
        return await self._link.status(timeout_s=timeout_s)

    async def watch(self, *, interval_s: float) -> AsyncGenerator[ProcessStatus, None]:
        """Yield what the worker says of itself; see the port."""
        async with aclosing(self._link.watch(interval_s=interval_s)) as statuses:
            async for status in statuses:
                yield status

    async def shrink(self, target_bytes: int, *, timeout_s: float) -> tuple[int, int]:
        """Have it give back what no stream needs; see the port."""
        return await self._link.shrink(target_bytes, timeout_s=timeout_s)

    async def unload(self, *, timeout_s: float) -> None:
        """Have it drop its model; the process stays."""
        await self._link.unload(timeout_s=timeout_s)

    async def adopt(self, controller: ProcessMark, *, output_path: str, timeout_s: float) -> None:
        """Pass it on; a worker started elsewhere follows no controller, and refuses."""
        await self._link.adopt(controller, output_path=output_path, timeout_s=timeout_s)

    async def shutdown(self, *, timeout_s: float) -> None:  # noqa: ARG002 - the process has its own
        """Give the worker back; its process is not ours to end."""
        await self._process.close()

    async def close(self) -> None:
        """Let go of the connection; running calls end."""
        await self._link.close()
