"""WorkerService: for the worker's controller alone.

Every request must name the worker's incarnation; another one, or none, is refused.
"""

# ruff: noqa: ARG002, N802 - gRPC's names and signatures

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from mlxd.v1 import types_pb2, worker_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.wire.convert import checked_duration_s, load_from_pb
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.records import write
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import LoadJob


class ControlServicer:
    """Load, unload, shrink, drain, shut down, follow another controller."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Load(
        self, request: worker_pb2.LoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.LoadResponse]:
        """Load the model and stream the progress; the load goes on if the caller disconnects."""
        self._check(request.worker_incarnation)
        async with aclosing(self._worker.load(job_from_pb(request))) as steps:
            async for progress in steps:
                yield worker_pb2.LoadResponse(progress=write(progress, types_pb2.LoadProgress))

    async def Unload(
        self, request: worker_pb2.UnloadRequest, context: Context
    ) -> worker_pb2.UnloadResponse:
        """Unload the model."""
        self._check(request.worker_incarnation)
        return worker_pb2.UnloadResponse(mlx_active_bytes=await self._worker.unload())

    async def Shrink(
        self, request: worker_pb2.ShrinkRequest, context: Context
    ) -> worker_pb2.ShrinkResponse:
        """Give memory back, and keep to a share of the disk."""
        self._check(request.worker_incarnation)
        if request.HasField("prefix_disk_bytes"):
            if request.prefix_disk_bytes > config.PREFIX_CACHE_BYTES_LIMIT:
                raise InvalidRequest.of(
                    "prefix_disk_bytes", f"at most {config.PREFIX_CACHE_BYTES_LIMIT}"
                )
            await self._worker.engine.share_disk(request.prefix_disk_bytes)
        before_nbytes, after_nbytes = await self._worker.engine.shrink(request.target_bytes)
        return worker_pb2.ShrinkResponse(bytes_before=before_nbytes, bytes_after=after_nbytes)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        """Admit no more streams and wait for those in flight."""
        self._check(request.worker_incarnation)
        grace_s = config.UNLOAD_GRACE_DEFAULT_S
        if request.HasField("grace"):
            grace_s = checked_duration_s(request.grace, "grace")
        return worker_pb2.DrainResponse(streams_left=await self._worker.drain(grace_s))

    async def Shutdown(
        self, request: worker_pb2.ShutdownRequest, context: Context
    ) -> worker_pb2.ShutdownResponse:
        """End the process, after this has been answered."""
        self._check(request.worker_incarnation)
        self._worker.stopping.set()
        return worker_pb2.ShutdownResponse()

    async def Adopt(
        self, request: worker_pb2.AdoptRequest, context: Context
    ) -> worker_pb2.AdoptResponse:
        """Follow another controller."""
        self._check(request.worker_incarnation)
        controller = ProcessMark(request.controller_pid, request.controller_start)
        self._worker.adopt(controller, output_path=request.output_path)
        return worker_pb2.AdoptResponse()

    def _check(self, incarnation: str) -> None:
        self._worker.check_incarnation(incarnation, required=True)


def job_from_pb(request: worker_pb2.LoadRequest) -> LoadJob:
    """Return the job, checked; raises InvalidRequest if a field is missing or out of range."""
    for name, value in (("path", request.path), ("digest", request.digest)):
        if not value:
            raise InvalidRequest.of(name, "is required")
    if not 1 <= len(request.name) <= config.MODEL_NAME_CHARS_MAX:
        raise InvalidRequest.of("name", f"1 to {config.MODEL_NAME_CHARS_MAX} characters")
    return LoadJob(
        path=Path(request.path),
        name=request.name,
        digest=request.digest,
        spec=load_from_pb(request.options),
    )
