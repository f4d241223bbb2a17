"""The composition root of a worker process: bind, say so, serve, stop gracefully.

Invariants:
- The ready line is written once: after the engine thread has MLX and the address is bound, or with
  the reason why there will be none. A process that is told to stop before may write none.
- However the process stops, no new stream is taken first, then those in flight get their grace,
  then the rest are told, then the engine thread is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import tempfile
from dataclasses import dataclass, replace
from threading import Event

import grpc

from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import MlxdError, ShuttingDown
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.ops.heap import keep_heap_trimmed
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.machine import this_machine
from mlxd_shared.security.disk_key import read_disk_key
from mlxd_shared.security.listeners import ListenerSecurity
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, announce, listen, stop
from mlxd_shared.wire.proof import Proof
from mlxd_worker.front.worker import Identity, Worker
from mlxd_worker.machine.backend import Backend
from mlxd_worker.process.exit_code import ExitCode
from mlxd_worker.process.lifeline import Lifeline
from mlxd_worker.process.options import Options
from mlxd_worker.servicers.service import SERVICES, add_services, new_server
from mlxd_worker.thread.engine_thread import EngineThread, MakeHost
from mlxd_worker.thread.facts import DiskFolder, LoadJob
from mlxd_worker.thread.switching import switch_off

FLUSH_GRACE_S = 1.0
"""What answers that are on their way get at the very end."""

_log = get_logger("worker")


def write_ready(fd: int | None, line: dict[str, object]) -> None:
    """Write the one line on the ready pipe, if there is one, and close it.

    If nobody reads, this process has been given up; a signal or the lifeline will end it.
    """
    if fd is None:
        return
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(line) + "\n")


@dataclass(slots=True)
class _End:
    """Why and how the process ends."""

    code: ExitCode
    grace_s: float


async def serve(
    options: Options, backend: Backend, *, unwanted: Event, make_host: MakeHost | None = None
) -> ExitCode:
    """Run the worker until it is told to stop, or its controller is gone, or the engine fails.

    make_host: see `EngineThread`; may raise ShuttingDown once `unwanted` is set, as signals do.

    Raises:
        MlxdError: it could not start; the ready line has not been written.
    """
    loop = asyncio.get_running_loop()
    end = _End(ExitCode.OK, options.stop_grace_s)
    stopping = asyncio.Event()

    def on_fault() -> None:
        end.code, end.grace_s = ExitCode.ENGINE_FAILED, 0.0
        stopping.set()

    def on_lost() -> float:
        # What is not ready is of no use to a controller that may come.
        grace_s = options.orphan_grace_s if worker.phase is ModelState.READY else 0.0
        _log.warning("the controller is gone", grace_s=grace_s)
        return grace_s

    _set_at_signals(loop, unwanted, stopping)
    kind, folder = backend.kind, _folder_with_key(options)
    engine = EngineThread(
        device=kind, loop=loop, on_fault=on_fault, make_host=make_host, folder=folder
    )
    security = options.security.load()
    async with contextlib.AsyncExitStack() as stack:
        engine.start()
        stack.push_async_callback(engine.stop)
        if not await _has_host(engine, unwanted):
            return ExitCode.OK
        health = Health()
        proof = Proof.make()
        server = new_server(health, security, proof)
        address = _listen(server, options, security, stack)
        machine = this_machine(options.machine)
        off = await switch_off(engine, options.findings, backend)
        identity = Identity(options.incarnation, address, backend, options.device, machine, off)
        worker = Worker(
            identity,
            engine,
            health,
            stopping=stopping,
            waiting_max=options.waiting_max,
            replay_steps_max=options.replay_steps,
        )
        stack.push_async_callback(worker.formats.close)
        stack.push_async_callback(worker.chats.close)
        stack.push_async_callback(worker.images.close)
        stack.push_async_callback(worker.tokens.close)
        # Before the ready line: a parent that ends right after it is missed by nobody.
        if options.life_fd is not None:
            worker.lifeline = Lifeline(options.life_fd, lost=on_lost, over=stopping.set)
            stack.callback(worker.lifeline.close)
        add_services(server, worker)
        await server.start()
        await announce(health, SERVICES)
        _say_ready(options, identity, proof)
        trimming = asyncio.create_task(keep_heap_trimmed(idle=worker.streams.idle.is_set))
        stack.callback(trimming.cancel)
        loading = asyncio.create_task(_load_own(worker, options, end))
        await stopping.wait()
        engine.abandon_load()
        await loading
        await _stop(server, worker, health, end)
    return end.code


def _set_at_signals(loop: asyncio.AbstractEventLoop, *events: Event | asyncio.Event) -> None:
    """Have what ends the process set these."""

    def on_signal() -> None:
        for event in events:
            event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _has_host(engine: EngineThread, unwanted: Event) -> bool:
    """Wait for the engine's host; return False if it was given up because it is unwanted."""
    try:
        await engine.ready()
    except ShuttingDown:
        if not unwanted.is_set():
            raise
        return False
    return True


def _folder_with_key(options: Options) -> DiskFolder | None:
    """Return where prompts are kept, with what they are encrypted with.

    Raises:
        InvalidRequest, BadCredentials: there should be a key, and there is none that can be used:
            nothing is written in the clear in its place.
    """
    folder, key_file = options.prefix_disk, options.prefix_disk_key
    if folder is None or key_file is None:
        return folder
    return replace(folder, key=read_disk_key(key_file))


def _listen(
    server: grpc.aio.Server,
    options: Options,
    security: ListenerSecurity,
    stack: contextlib.AsyncExitStack,
) -> str:
    """Bind, and return what to dial; a private socket is made where no address is given."""
    text = options.listen
    if text is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxd-"))
        text = f"unix:{folder}/worker.sock"
    address = parse_address(text)
    target = listen(server, address, security=security, anywhere=options.allow_remote)
    if address.is_unix:  # ours from here on
        stack.callback(address.path.unlink, missing_ok=True)
    return target


def _say_ready(options: Options, identity: Identity, proof: Proof) -> None:
    blas = identity.backend.blas
    _log.info(
        "listening",
        address=identity.address,
        incarnation=identity.incarnation,
        backend=identity.backend.distribution,
        mlx=identity.backend.version,
        blas=blas.name,
        blas_threads=blas.threads,
        compiles=identity.backend.compile_allowed,
    )
    line: dict[str, object] = {
        "address": identity.address,
        "pid": os.getpid(),
        "incarnation": identity.incarnation,
        "version": importlib.metadata.version("mlxd"),
        "proof": proof.secret,
    }
    write_ready(options.ready_fd, line)


async def _load_own(worker: Worker, options: Options, end: _End) -> None:
    """Load the model of the command line, if there is one; end the process where that fails."""
    folder = options.model
    if folder is None:
        return
    try:
        digest = await asyncio.to_thread(model_digest, folder)
        job = LoadJob(path=folder, name=options.name, digest=digest, spec=options.spec)
        async for _ in worker.load(job):
            pass
    except Exception as error:  # noqa: BLE001 - there is nobody else to tell
        if worker.stopping.is_set():
            return
        bug = None if isinstance(error, MlxdError) else error
        _log.error("cannot serve the model", path=str(folder), reason=str(error), exc_info=bug)
        end.code = ExitCode.LOAD_FAILED
        worker.stopping.set()


async def _stop(server: grpc.aio.Server, worker: Worker, health: Health, end: _End) -> None:
    _log.info("stopping", streams=len(worker.streams), grace_s=end.grace_s, code=end.code.name)
    await health.leave()
    left = await worker.streams.drain(end.grace_s)
    if left and end.code is not ExitCode.ENGINE_FAILED:
        with contextlib.suppress(MlxdError):  # the engine may fail at this very moment
            await worker.engine.end_streams(ShuttingDown())
    await stop(server, health, grace_s=FLUSH_GRACE_S)
