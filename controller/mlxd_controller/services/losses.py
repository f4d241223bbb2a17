"""What it means when a worker stops answering during a call, and how long to wait."""

from __future__ import annotations

import grpc

from mlxd_controller.runtime.ports import WorkerLink
from mlxd_controller.runtime.runtime import Lease
from mlxd_shared import config
from mlxd_shared.domain import errors as e
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.status import RemoteError

GONE = (e.WorkerLost, e.ModelDraining, e.ShuttingDown, e.WrongWorker)
"""The errors of a worker that is going away or has gone."""
LEAVING_WAIT_S = 10.0
"""How long to wait for the end of a worker that seems to be going; above its streams' grace."""
DEADLINE_MARGIN_S = 0.1
"""A wait for a model ends this long before the client's deadline, so that the client learns why."""
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_log = get_logger("inference")


def model_wait_s(remaining_s: float | None) -> float:
    """Return how long a request with this time to its deadline may wait for its model."""
    if remaining_s is None:
        return config.LOAD_TOTAL_TIMEOUT_S
    return remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 2)


def link_of(lease: Lease) -> WorkerLink:
    """Return the connection to the lease's worker."""
    assert lease.worker.link is not None
    return lease.worker.link


async def explain(error: RemoteError, lease: Lease, offset: int) -> e.MlxdError:
    """Return what a broken connection means: our own abort, a dead worker, or the error itself."""
    if lease.aborted is not None:
        return lease.aborted
    if error.code not in _LOST:
        return error
    # gRPC's message contains the worker's address, which clients must not see.
    _log.warning("lost the connection to a worker", reason=error.describe())
    cause = await lease.worker.cause() or "the connection broke"
    return e.WorkerLost(lease.model.name, offset, cause)
