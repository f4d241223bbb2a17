"""A real worker process for a test: started, dialled, stopped and reaped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from mlxd.v1 import (
    inference_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from mlxd_shared.security.net import CHANNEL_OPTIONS
from mlxd_shared.wire.proof import Proof
from mlxd_shared.wire.records import duration_from_pb, duration_to_pb

START_S_MAX = 60.0
STOP_S_MAX = 60.0
DIGEST = "d" * 64
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(slots=True)
class Pipe:
    """A pipe whose one end goes to a child."""

    read_fd: int
    write_fd: int
    _open: set[int] = field(default_factory=set)

    @classmethod
    def make(cls) -> Pipe:
        """Return a fresh pipe."""
        read_fd, write_fd = os.pipe()
        return cls(read_fd, write_fd, {read_fd, write_fd})

    def close(self, *fds: int) -> None:
        """Close these ends, or what is open; idempotent."""
        for fd in self._open & set(fds or (self.read_fd, self.write_fd)):
            self._open.remove(fd)
            os.close(fd)


@dataclass(slots=True)
class WorkerProcess:
    """A worker that is listening."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    address: str
    pid: int
    incarnation: str
    log_path: Path
    life: Pipe
    proof: Proof
    """What it wrote on its ready line for its controller alone."""
    inference: inference_pb2_grpc.InferenceServiceAsyncStub = field(init=False)
    status: status_pb2_grpc.StatusServiceAsyncStub = field(init=False)
    control: worker_pb2_grpc.WorkerServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.status = status_pb2_grpc.StatusServiceStub(self.channel)
        self.control = worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def load(
        self, folder: Path, *, name: str = "tiny", digest: str = DIGEST, **options: Any
    ) -> list[worker_pb2.LoadResponse]:
        """Load a model; return every message."""
        request = worker_pb2.LoadRequest(
            worker_incarnation=self.incarnation,
            path=str(folder),
            name=name,
            digest=digest,
            options=types_pb2.LoadOptions(**options),
        )
        return [message async for message in self.control.Load(request)]

    async def own_status(self) -> status_pb2.WorkerStatus:
        """Return what the worker says about itself."""
        got = await self.status.GetStatus(status_pb2.GetStatusRequest())
        return got.status.workers[0]

    async def fresh_status(self) -> status_pb2.WorkerStatus:
        """Return what it says with figures of after this call, however long its engine takes."""
        begun_s = time.monotonic()
        while True:
            asked_s = time.monotonic()
            status = await self.own_status()
            if duration_from_pb(status.figures_age) <= asked_s - begun_s:
                return status

    async def sweep(self) -> status_pb2.WorkerStatus:
        """Have it give back all that no stream needs; return its status then."""
        await self.control.Shrink(
            worker_pb2.ShrinkRequest(worker_incarnation=self.incarnation, target_bytes=0)
        )
        return await self.fresh_status()

    async def until(
        self, holds: Callable[[status_pb2.WorkerStatus], bool]
    ) -> status_pb2.WorkerStatus:
        """Return the first status, out of those the worker sends, for which `holds` is true."""
        watch = self.status.WatchStatus(status_pb2.WatchStatusRequest(interval=duration_to_pb(0.1)))
        async for message in watch:
            worker = message.status.workers[0]
            if holds(worker):
                watch.cancel()
                return worker
        raise AssertionError("the worker stopped before it came to that")

    async def wait_ended(self) -> int:
        """Wait for the process to end; return its exit code."""
        return await asyncio.wait_for(self.process.wait(), STOP_S_MAX)

    @property
    def log(self) -> str:
        """Everything that the process has written to its log."""
        return self.log_path.read_text(encoding="utf-8")


@contextlib.asynccontextmanager
async def running_worker(
    *arguments: str,
    listen: str | None = None,
    module: str = "mlxd_worker",
    environ: dict[str, str] | None = None,
) -> AsyncIterator[WorkerProcess]:
    """Start `python -m` with `module`, wait for its ready line, yield it, stop and reap it.

    listen: where; None is a socket of the test's own, "" leaves it to the worker. environ: more
    variables for it.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxd-test-")))
        line, process, life = await _start(
            stack,
            folder,
            f"unix:{folder}/w.sock" if listen is None else listen,
            arguments,
            module=module,
            environ=environ,
        )
        log_path = folder / "log"
        if "error" in line:
            message = f"the worker did not start: {line}\n{log_path.read_text(encoding='utf-8')}"
            raise AssertionError(message)
        channel = grpc.aio.insecure_channel(str(line["address"]), options=list(CHANNEL_OPTIONS))
        await stack.enter_async_context(channel)
        yield WorkerProcess(
            process=process,
            channel=channel,
            address=str(line["address"]),
            pid=int(str(line["pid"])),
            incarnation=str(line["incarnation"]),
            log_path=log_path,
            life=life,
            proof=Proof(str(line["proof"])),
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker that did not start: its ready line, exit code and log."""

    line: dict[str, object]
    code: int
    log: str


async def refused_worker(*arguments: str, environ: dict[str, str] | None = None) -> Refused:
    """Start a worker that cannot; return how it ended."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxd-test-")))
        listen = f"unix:{folder}/w.sock"
        line, process, _ = await _start(stack, folder, listen, arguments, environ=environ)
        code = await asyncio.wait_for(process.wait(), STOP_S_MAX)
        return Refused(line, code, (folder / "log").read_text(encoding="utf-8"))


async def _start(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    listen: str,
    arguments: tuple[str, ...],
    *,
    module: str = "mlxd_worker",
    environ: dict[str, str] | None = None,
) -> tuple[dict[str, object], asyncio.subprocess.Process, Pipe]:
    """Start the process; return its ready line, itself, and the pipe that keeps it alive."""
    ready, life = Pipe.make(), Pipe.make()
    stack.callback(ready.close)
    stack.callback(life.close)
    address = ["--listen", listen] if listen else []
    own = [*address, "--ready-fd", str(ready.write_fd), "--life-fd", str(life.read_fd)]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *own,
            *arguments,
            stderr=log,
            pass_fds=(ready.write_fd, life.read_fd),
            start_new_session=True,
            env={**os.environ, **(environ or {})},
            cwd=ROOT,
        )
    stack.push_async_callback(_reap, process)
    ready.close(ready.write_fd)
    life.close(life.read_fd)
    text = await asyncio.wait_for(asyncio.to_thread(_read_line, ready.read_fd), START_S_MAX)
    if not text:
        message = f"no ready line:\n{(folder / 'log').read_text(encoding='utf-8')}"
        raise AssertionError(message)
    line: dict[str, object] = json.loads(text)
    return line, process, life


def _read_line(fd: int) -> str:
    with os.fdopen(fd, encoding="utf-8", closefd=False) as pipe:
        return pipe.readline()


async def _reap(process: asyncio.subprocess.Process) -> None:
    """End the process if it still runs, and take its exit code."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S_MAX)
        except TimeoutError:
            process.kill()
            await process.wait()
