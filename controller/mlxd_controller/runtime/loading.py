"""The life of one worker at the edge: launch, load, end. Tells the kinds of failure apart.

Invariants:
- load_worker() leaves either a ready worker or none at all, even when it is cancelled.
- Every wait has a limit: launching, each step of the progress, the shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from mlxd_controller.core.actions import StartLoad
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.runtime.ports import Ports, WorkerLink
from mlxd_controller.runtime.worker import Worker
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, WorkerExited, WorkerStartFailed, WorkerTimedOut
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.status import RemoteError

FIRST_STATUS_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0
STAGE_READY = "ready"
_log = get_logger("loading")


async def load_worker(
    worker: Worker,
    action: StartLoad,
    ports: Ports,
    *,
    stall_timeout_s: float,
    on_progress: Callable[[LoadProgress], None],
) -> None:
    """Launch the process, load the model, and record its first figures on `worker`.

    Raises:
        WorkerExited, WorkerTimedOut, WorkerStartFailed, BackendProblem: there is no worker.
        MlxdError: the worker refused the model.
    """
    try:
        process = await ports.launcher.launch(
            model=worker.name, incarnation=worker.incarnation, device=worker.plan.device
        )
    except WorkerStartFailed as error:
        worker.failed_start = error
        raise
    worker.process = process
    worker.incarnation = process.incarnation  # a worker started by others has its own
    try:
        worker.link = link = ports.connect(
            address=process.address,
            incarnation=worker.incarnation,
            digest=worker.digest,
            proof=process.proof,
        )
        await _follow(link, worker, action, stall_timeout_s, on_progress)
        status = await link.status(timeout_s=FIRST_STATUS_TIMEOUT_S)
        worker.note_status(status, ports.clock.now_s())
    except BaseException as error:
        reason = await _explain(error, worker) if isinstance(error, RemoteError) else error
        if worker.link is not None:
            await worker.link.close()
        await process.close()
        if reason is not error:
            raise reason from error
        raise


async def _follow(
    link: WorkerLink,
    worker: Worker,
    action: StartLoad,
    stall_timeout_s: float,
    on_progress: Callable[[LoadProgress], None],
) -> None:
    """Order the plan's choices, with the defaults fixed at load, and pass the progress on."""
    spec = LoadSpec(
        context_length=action.plan.context_length,
        rows_max=action.plan.rows_max,
        weights=action.plan.weights,
        kv_format=action.plan.kv_format,
        prefix_cache_nbytes=action.plan.prefix_bytes,
        sampling=action.spec.sampling,
        ranks=action.plan.ranks if action.plan.ranks > 1 else action.spec.ranks,
    )
    last = LoadProgress()
    async with aclosing(link.load(action.name, action.path, spec)) as steps:
        while True:
            try:
                step = await hear(anext(steps, None), limit_s=stall_timeout_s)
            except TimeoutError:
                raise WorkerTimedOut(worker.name, worker.last_lines(), stall_timeout_s) from None
            if step is None:
                break
            last = step
            on_progress(step)
    if last.stage != STAGE_READY:
        raise WorkerStartFailed(worker.name, worker.last_lines())


async def _explain(error: RemoteError, worker: Worker) -> MlxdError:
    """Return why the link broke: the end of the process, if it comes soon."""
    await worker.wait_ended(wait_s=config.EOF_GRACE_S)
    if worker.exit_code is not None:
        return WorkerExited(worker.name, worker.last_lines(), worker.exit_code)
    return WorkerStartFailed(worker.name, (*worker.last_lines(), error.describe()))


async def end_worker(worker: Worker) -> None:
    """End a worker in any state: ask it, then interrupt, then kill. No process is left."""
    worker.stopping = True
    if worker.loading is not None and not worker.loading.done():
        worker.loading.cancel()
        await asyncio.wait({worker.loading})
    if worker.link is not None:
        if worker.exit_code is None:
            try:
                await worker.link.shutdown(timeout_s=SHUTDOWN_TIMEOUT_S)
                await worker.wait_ended(wait_s=config.WORKER_INTERRUPT_GRACE_S)
            except MlxdError as error:
                reason = error.describe()
                _log.warning("worker refused the shutdown", model=worker.name, reason=reason)
        await worker.link.close()
    if worker.process is not None:
        await worker.process.close()
