"""What an earlier controller left in the run directory: adopted, or purged.

Invariants:
- Afterwards it holds only the files of adopted workers.
- A worker is adopted if it is the very process of its record, ready, of this version, started with
  this controller's options, and serves a model that is configured here; one worker per model.
- A process that its record does not identify for certain, or of another user, gets no signal: what
  listens on the socket is only asked to end.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import psutil

from mlxd_controller.launcher.process import AdoptedWorker
from mlxd_controller.launcher.records import Record, WorkerFiles
from mlxd_controller.launcher.run_dir import RunDir
from mlxd_controller.runtime.ports import Connect, Holding, ModelRef, ModelStore, Survivor
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import ModelState, ProcessStatus
from mlxd_shared.ops.known_process import KnownProcess, mark_of
from mlxd_shared.ops.logs import get_logger

AT_ONCE_MAX = 32
"""How many workers are examined concurrently."""
_log = get_logger("adoption")


@asynccontextmanager
async def survivors_of(
    run_dir: RunDir, store: ModelStore, connect: Connect, *, arguments: Sequence[str]
) -> AsyncIterator[tuple[Survivor, ...]]:
    """Yield the adopted workers; all others have ended by then.

    arguments: what this controller's launcher starts workers with. At exit the workers that still
    live are ended. Takes seconds if an unknown worker does not end by itself.
    """
    survivors: dict[str, Survivor] = {}
    turn = asyncio.Semaphore(AT_ONCE_MAX)

    async def look(files: WorkerFiles) -> None:
        async with turn:
            await _look(files, store, connect, tuple(arguments), survivors)

    try:
        stems = run_dir.stems()
        async with asyncio.TaskGroup() as tasks:
            for stem in stems:
                tasks.create_task(look(WorkerFiles(run_dir.path, stem)))
        yield tuple(survivors.values())
    finally:
        for survivor in survivors.values():  # ended already, unless the start failed
            await survivor.link.close()
            await survivor.process.close()


async def _look(
    files: WorkerFiles,
    store: ModelStore,
    connect: Connect,
    arguments: tuple[str, ...],
    survivors: dict[str, Survivor],
) -> None:
    """Add the worker of these files to `survivors`, or purge what is there."""
    record = files.read()
    if record is None or (known := _find_process(record)) is None:
        await _ask_whoever_listens(files, connect)
        files.remove()
        return
    worker = AdoptedWorker(known, record, files)
    try:
        survivor = await _adopt(worker, record, store, connect, arguments)
        if survivor is None:
            await _purge(worker, connect)
            return
    except BaseException:
        await worker.close()
        raise
    if survivor.ref.digest in survivors:  # a second worker for a model is of no use
        await survivor.link.close()
        await _purge(worker, connect)
    else:
        survivors[survivor.ref.digest] = survivor


def _find_process(record: Record) -> KnownProcess | None:
    """Return the process of a record if it lives and is this user's."""
    try:
        known = KnownProcess(record.mark)
    except ProcessLookupError:
        return None
    try:
        if psutil.Process(record.mark.pid).uids().real == os.getuid():
            return known
    except psutil.NoSuchProcess:
        pass  # it has just ended
    known.close()
    return None


async def find_configured(store: ModelStore, holding: Holding) -> ModelRef | None:
    """Return the model that a worker holds; None if it is not configured here.

    By name first: reading all stores may take longer than the worker waits.
    """
    with suppress(MlxdError):  # the name may mean another model by now, or none
        ref = await store.resolve(holding.name)
        if ref.digest == holding.digest:
            return ref
    await store.list_models()
    return store.find_known(holding.digest)


async def _adopt(
    worker: AdoptedWorker,
    record: Record,
    store: ModelStore,
    connect: Connect,
    arguments: tuple[str, ...],
) -> Survivor | None:
    """Adopt a worker; return None, and log why, if it is not to be adopted."""
    holding = record.holding
    ref = None if holding is None else await find_configured(store, holding)
    if holding is None or ref is None or record.arguments != arguments:
        problem = "it was started with other options"
        if holding is None or ref is None:
            problem = "it was not ready" if holding is None else "its model is not configured"
        _log.warning("unknown worker", pid=worker.pid, reason=problem)
        return None
    link = connect(
        address=worker.address,
        incarnation=worker.incarnation,
        digest=ref.digest,
        proof=worker.proof,
    )
    mine = mark_of(os.getpid())
    assert mine is not None, "this process lives"
    try:
        status = await link.status(timeout_s=config.ADOPTION_TIMEOUT_S)
        problem = problem_of(
            status, pid=worker.pid, incarnation=worker.incarnation, digest=holding.digest
        )
        if not problem:
            await worker.take_over(
                lambda path: link.adopt(mine, output_path=path, timeout_s=config.ADOPTION_TIMEOUT_S)
            )
    except (MlxdError, OSError) as error:
        problem = str(error)
    except BaseException:
        await link.close()
        raise
    if problem:
        _log.warning("unknown worker", pid=worker.pid, model=ref.name, reason=problem)
        await link.close()
        return None
    _log.info("worker adopted", pid=worker.pid, model=ref.name, incarnation=worker.incarnation)
    figures = status.workers[0]
    return Survivor(worker, link, figures, holding, ref, figures.device)


def problem_of(status: ProcessStatus, *, pid: int, incarnation: str, digest: str) -> str:
    """Return what prevents a worker from being adopted; "" for nothing.

    status: what it reports. pid, incarnation, digest: what is recorded of it.
    """
    if status.version != importlib.metadata.version("mlxd"):
        return f"it is of version {status.version}"
    if len(status.workers) != 1:
        return "it does not report itself"
    figures = status.workers[0]
    if (figures.pid, figures.incarnation) != (pid, incarnation):
        return f"it reports itself as {figures.incarnation}, process {figures.pid}"
    if figures.state is not ModelState.READY:
        return f"its model is {figures.state.value}"
    if figures.model_digest != digest:
        return "it holds another model than its record says"
    return ""


async def _purge(worker: AdoptedWorker, connect: Connect) -> None:
    """End a worker: ask it, then interrupt, then kill."""
    if await _ask_to_end(worker.address, worker.incarnation, connect):
        await worker.ends_within(config.PURGE_GRACE_S)
    await worker.close()


async def _ask_whoever_listens(files: WorkerFiles, connect: Connect) -> None:
    """Ask what listens on a socket without a valid record to end; it is never signalled."""
    if not files.socket.is_socket():
        return
    link = connect(address=files.address, incarnation="", digest="")
    try:
        status = await link.status(timeout_s=config.ADOPTION_TIMEOUT_S)
    except MlxdError as error:
        _log.debug("no answer", socket=files.socket.name, reason=str(error))
        return
    finally:
        await link.close()
    for figures in status.workers:
        _log.warning("unknown worker", pid=figures.pid, reason="it has no record")
        await _ask_to_end(files.address, figures.incarnation, connect)


async def _ask_to_end(address: str, incarnation: str, connect: Connect) -> bool:
    link = connect(address=address, incarnation=incarnation, digest="")
    try:
        await link.shutdown(timeout_s=config.ADOPTION_TIMEOUT_S)
    except MlxdError as error:
        _log.info("unknown worker refused the shutdown", reason=str(error))
        return False
    finally:
        await link.close()
    return True
