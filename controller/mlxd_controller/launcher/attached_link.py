"""The link to a worker that others started.

A load replaces the worker's model, and ending its use does not end its process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from mlxd_controller.runtime.ports import WorkerProcess
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_shared.domain.errors import InvalidRequest, ModelDraining, WrongWorker
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.secure_channel import ChannelSecurity

UNLOAD_TIMEOUT_S = 30.0
_log = get_logger("attached")


class AttachedLink(GrpcLink):
    """A link that lives as long as `process` is in use."""

    def __init__(self, process: WorkerProcess, *, digest: str, security: ChannelSecurity) -> None:
        super().__init__(
            address=process.address,
            incarnation=process.incarnation,
            digest=digest,
            security=security,
        )
        self._process = process

    async def load(
        self, name: str, path: str, spec: LoadSpec
    ) -> AsyncGenerator[LoadProgress, None]:
        """Load and yield the progress; unload a model loaded otherwise first.

        A model already loaded as ordered stays: the only step is "ready".
        """
        try:
            async with aclosing(super().load(name, path, spec)) as steps:
                async for step in steps:
                    yield step
        except (InvalidRequest, ModelDraining, WrongWorker) as error:
            # Raised before the first step: the worker holds another model, or other options.
            _log.info("making room in the worker", model=name, reason=error.describe())
        else:
            return
        await self.unload(timeout_s=UNLOAD_TIMEOUT_S)
        async with aclosing(super().load(name, path, spec)) as steps:
            async for step in steps:
                yield step

    async def shutdown(self, *, timeout_s: float) -> None:  # noqa: ARG002 - the process has its own
        """Give the worker back; ending its process is not our business."""
        await self._process.close()
