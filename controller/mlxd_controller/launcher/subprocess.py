"""The default launcher: the running interpreter as a child, with a private Unix socket.

Invariants:
- Every launch has a socket path of its own, in a folder that only this user can enter.
- Of the pipes, the child inherits the write end of `ready` and the read end of `life`, nothing
  else; the controller's end of `life` is open as long as the child lives, and closes with the
  controller however that ends.
- launch() either returns a process that listens, or leaves none behind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from mlxd_controller.launcher.environment import device_environment, own_environment
from mlxd_controller.launcher.pipes import Pipe, PipeReader
from mlxd_controller.launcher.process import SubprocessWorker
from mlxd_controller.launcher.ready import ReadyLine, parse_ready_line
from mlxd_shared import config
from mlxd_shared.errors import InvalidRequest, WorkerExited, WorkerStartFailed, WorkerTimedOut
from mlxd_shared.logs import get_logger
from mlxd_shared.units import timeout_of

WORKER_COMMAND = (sys.executable, "-m", "mlxd_worker")
RUN_DIR_PREFIX = "mlxd-"
SHORT_TEMPORARY_DIR = "/tmp"  # noqa: S108 - mkdtemp makes a private folder in it
RUN_DIR_BYTES_MAX = config.UNIX_PATH_BYTES_MAX - len("/") - len("ffffffff-ffffffff.sock")
"""What a run_dir may have, so that the name of every launch's socket fits behind it."""
_log = get_logger("launcher")


class SubprocessLauncher:
    """Implements ports.Launcher."""

    def __init__(
        self,
        *,
        run_dir: Path | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        environment: Mapping[str, str] | None = None,
        stall_timeout_s: float = config.LOAD_STALL_TIMEOUT_S,
        orphan_grace_s: float = config.ORPHAN_GRACE_S,
        waiting_max: int | None = None,
        gpu_ids: Mapping[str, str] | None = None,
    ) -> None:
        """Make the folder of sockets; `run_dir` None makes a private temporary one.

        waiting_max: how many streams may wait in a worker; None leaves it to the worker.
        gpu_ids: the driver's ids of the devices that a worker sees alone, by their names.

        Raises:
            InvalidRequest: `run_dir` is too long for a socket's path, or cannot be made.
        """
        self._command = tuple(command)
        self._environment = own_environment() if environment is None else dict(environment)
        self._stall_timeout_s = stall_timeout_s
        self._orphan_grace_s = orphan_grace_s
        self._waiting = () if waiting_max is None else ("--waiting-max", str(waiting_max))
        self._gpu_ids = dict(gpu_ids or {})
        self._owned = run_dir is None
        self._run_dir = make_run_dir(run_dir)
        self._launches = 0

    def close(self) -> None:
        """Remove what this launcher made; to be called when no worker is left."""
        if self._owned:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    async def launch(self, *, model: str, incarnation: str, device: str = "") -> SubprocessWorker:
        """Start a worker and return it once it listens; see the port."""
        log = _log.bind(model=model, incarnation=incarnation, device=device)
        try:
            worker, ready = await self._start(incarnation, device, log)
        except OSError as error:
            reason = f"{self._command[0]}: {error.strerror}"
            raise WorkerStartFailed(model, (reason,)) from error
        log.info("worker launched", pid=worker.pid)
        try:
            found = await self._wait_ready(worker, ready, model=model)
        except BaseException:
            await worker.close()
            raise
        worker.listens_on(found.address)
        return worker

    async def _start(
        self, incarnation: str, device: str, log: FilteringBoundLogger
    ) -> tuple[SubprocessWorker, PipeReader]:
        """Start the process; return it with the reader of its ready pipe, or leave nothing."""
        self._launches += 1
        socket = self._run_dir / f"{os.getpid():x}-{self._launches:x}.sock"
        with ExitStack() as unowned:
            ready, life, output = (unowned.enter_context(closing(Pipe.make())) for _ in range(3))
            # Made before the process: from its start to its owner there is nothing to wait for.
            readers = [
                unowned.enter_context(closing(await pipe.reader())) for pipe in (ready, output)
            ]
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--listen", f"unix:{socket}", "--incarnation", incarnation),
                *("--ready-fd", str(ready.write_fd), "--life-fd", str(life.read_fd)),
                *("--orphan-grace", str(self._orphan_grace_s), "--log-format", "json"),
                *(("--device", device) if device else ()),
                *self._waiting,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_fd,
                stderr=output.write_fd,
                start_new_session=True,
                pass_fds=(ready.write_fd, life.read_fd),
                env={**self._environment, **device_environment(self._gpu_ids.get(device, ""))},
            )
            unowned.pop_all()
        ready.close(ready.write_fd)
        life.close(life.read_fd)
        output.close(output.write_fd)
        worker = SubprocessWorker(
            process,
            incarnation=incarnation,
            output=readers[1],
            life=life,
            socket=socket,
            log=log,
        )
        return worker, readers[0]

    async def _wait_ready(
        self, worker: SubprocessWorker, ready: PipeReader, *, model: str
    ) -> ReadyLine:
        line = asyncio.create_task(_read_line(ready))
        ended = asyncio.create_task(worker.wait_exited())
        try:
            await asyncio.wait(
                {line, ended},
                timeout=timeout_of(self._stall_timeout_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if line.done() and line.result():
                return parse_ready_line(line.result(), model=model)
            if line.done():
                # A worker that ends closes its pipe: this is its end, seen a moment early. The end
                # itself may take the grace of the output's.
                await asyncio.wait({ended}, timeout=2 * config.EOF_GRACE_S)
            if ended.done():
                raise WorkerExited(model, worker.last_lines(), ended.result())
            if line.done():
                raise WorkerStartFailed(model, worker.last_lines())
            raise WorkerTimedOut(model, worker.last_lines(), self._stall_timeout_s)
        finally:
            for task in (line, ended):
                task.cancel()
            await asyncio.wait({line, ended})
            ready.close()


async def _read_line(ready: PipeReader) -> bytes:
    """Return the line from the ready pipe; b"" where it ended before."""
    try:
        line = await ready.stream.readline()
    except ValueError:
        return b"too long"  # over the limit: parse_ready_line refuses it as unreadable
    return line if line.endswith(b"\n") else b""


def make_run_dir(path: Path | None) -> Path:
    """Return a private folder for sockets, made if it is not there.

    Raises:
        InvalidRequest: it cannot be made, belongs to others, or leaves no room for a socket's name.
    """
    if path is None:
        return _temporary_dir()
    if not _has_room(path):
        raise InvalidRequest.of("run_dir", f"{path} is longer than {RUN_DIR_BYTES_MAX} bytes")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise InvalidRequest.of("run_dir", f"{path}: {error.strerror}") from error
    return path


def _temporary_dir() -> Path:
    """Make a folder where temporary files go, or in /tmp where that path is too long for sockets.

    The system makes it with mode 0700, under a name that nobody can foresee.
    """
    path = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX))
    if not _has_room(path):
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=SHORT_TEMPORARY_DIR))
    return path


def _has_room(path: Path) -> bool:
    return len(os.fsencode(path)) <= RUN_DIR_BYTES_MAX
