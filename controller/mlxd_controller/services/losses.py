"""What it means that a worker stops answering in the middle of a call, and how long to wait."""

from __future__ import annotations

import grpc

from mlxd_controller.runtime.ports import WorkerLink
from mlxd_controller.runtime.runtime import Lease
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    MlxdError,
    ModelDraining,
    ShuttingDown,
    WorkerLost,
    WrongWorker,
)
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.status import RemoteError

GONE = (WorkerLost, ModelDraining, ShuttingDown, WrongWorker)
"""What a request hears from, or of, a worker that is going or has gone."""
LEAVING_WAIT_S = 10.0
"""What a worker that seems to be going gets to have gone; more than its grace for its streams."""
DEADLINE_MARGIN_S = 0.1
"""A wait for a model ends this much before the client's deadline, so that it hears why."""
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_log = get_logger("inference")


def model_wait_s(remaining_s: float | None) -> float:
    """Return how long a request may wait for its model, `remaining_s` before its deadline."""
    if remaining_s is None:
        return config.LOAD_TOTAL_TIMEOUT_S
    return remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 2)


def link_of(lease: Lease) -> WorkerLink:
    """Return the connection to the lease's worker."""
    assert lease.worker.link is not None
    return lease.worker.link


async def explain(error: RemoteError, lease: Lease, offset: int) -> MlxdError:
    """Return what a broken connection means: an abort of ours, a dead worker, or itself."""
    if lease.aborted is not None:
        return lease.aborted
    if error.code not in _LOST:
        return error
    # gRPC's own words name the worker's address, which is not the client's to know.
    _log.warning("lost the connection to a worker", reason=error.describe())
    cause = await lease.worker.cause() or "the connection broke"
    return WorkerLost(lease.model.name, offset, cause)
