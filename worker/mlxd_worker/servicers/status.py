"""StatusService of a worker. Never waits for a forward pass: see `EngineThread.figures`."""

# ruff: noqa: ARG002, N802 - names and signatures are gRPC's

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from mlxd.v1 import status_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.wire.convert import checked_duration_s
from mlxd_shared.wire.interceptors import Context
from mlxd_worker.front.worker import Worker
from mlxd_worker.servicers.metrics import WorkerMetrics
from mlxd_worker.servicers.status_report import status_to_pb


class StatusServicer:
    """What this worker does and holds."""

    def __init__(self, worker: Worker, metrics: WorkerMetrics) -> None:
        self._worker = worker
        self._metrics = metrics

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: Context
    ) -> status_pb2.GetStatusResponse:
        """Return the status of this moment."""
        return status_pb2.GetStatusResponse(status=await self._status(request.model))

    async def WatchStatus(
        self, request: status_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[status_pb2.WatchStatusResponse]:
        """Send the status at once and then at every interval, until the process stops."""
        interval_s = watch_interval_s(request)
        while True:
            yield status_pb2.WatchStatusResponse(status=await self._status(request.model))
            try:
                await asyncio.wait_for(self._worker.stopping.wait(), interval_s)
            except TimeoutError:
                continue
            return

    async def _status(self, model: str) -> status_pb2.Status:
        figures = await self._worker.engine.figures()
        return status_to_pb(self._worker, figures, self._metrics, model=model)


def watch_interval_s(request: status_pb2.WatchStatusRequest) -> float:
    """Return the seconds between two messages.

    Raises:
        InvalidRequest: shorter than the bound.
    """
    if not request.HasField("interval"):
        return config.WATCH_INTERVAL_DEFAULT_S
    interval_s = checked_duration_s(request.interval, "interval")
    if not config.WATCH_INTERVAL_MIN_S <= interval_s <= config.LOAD_TOTAL_TIMEOUT_S:
        limit = f"{config.WATCH_INTERVAL_MIN_S} s to {config.LOAD_TOTAL_TIMEOUT_S} s"
        raise InvalidRequest.of("interval", limit)
    return interval_s
