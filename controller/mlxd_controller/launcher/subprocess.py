"""The default launcher: the running interpreter as a child, with a private Unix socket.

The child inherits the write end of the pipe `ready` and the read end of `life`, nothing else. The
controller's end of `life` is open as long as the child lives, and closes with the controller
however the controller ends.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxd_controller.launcher import child
from mlxd_controller.launcher.child import Pipe, PipeReader
from mlxd_controller.launcher.environment import own_environment
from mlxd_controller.launcher.process import SubprocessWorker
from mlxd_controller.launcher.records import Record, WorkerFiles
from mlxd_controller.launcher.run_dir import RunDir
from mlxd_controller.memory.nvidia import VISIBLE_VARIABLE
from mlxd_controller.runtime.hearing import wait_for_answer
from mlxd_models.files.model_files import machine_short
from mlxd_models.fit.groups import split_group
from mlxd_shared import config
from mlxd_shared.domain import errors as e
from mlxd_shared.ops.backends import check_own_worker
from mlxd_shared.ops.known_process import mark_of
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.proof import Proof

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

WORKER_COMMAND = (sys.executable, "-m", "mlxd_worker")
_log = get_logger("launcher")


@dataclass(frozen=True, slots=True)
class ReadyLine:
    """A listening worker. `proof`: by what it accepts a request as checked."""

    address: str
    version: str
    proof: Proof | None


def parse_ready_line(line: bytes, *, model: str) -> ReadyLine:
    """Parse a worker's ready line. `model` is for messages.

    Raises:
        BackendProblem: the worker reports why it cannot serve on this machine.
        WorkerStartFailed: the line is not a ready line.
    """
    try:
        match json.loads(line):
            case {"error": str(problem)}:
                raise e.BackendProblem(problem)
            case {
                "address": str(address),
                "pid": int(),
                "incarnation": str(),
                "version": str(version),
                **fields,
            }:
                secret = fields.get("proof")
                return ReadyLine(address, version, None if secret is None else Proof(str(secret)))
    except (ValueError, RecursionError):
        pass
    raise e.WorkerStartFailed(model, ("the worker wrote no valid ready line",))


class SubprocessLauncher:
    """Implements ports.Launcher."""

    def __init__(
        self,
        *,
        run_dir: RunDir | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        environment: Mapping[str, str] | None = None,
        stall_timeout_s: float = config.LOAD_STALL_TIMEOUT_S,
        orphan_grace_s: float = config.ORPHAN_GRACE_S,
        waiting_max: int | None = None,
        gpu_ids: Mapping[str, str] | None = None,
        findings: Path | None = None,
        prefix_disk: Path | None = None,
        prefix_disk_key: Path | None = None,
        listen: str | None = None,
        further: Sequence[str] = (),
    ) -> None:
        """Own `run_dir`, for sockets and records; None makes a temporary one.

        waiting_max: how many streams may wait in a worker; None leaves it to the worker.
        gpu_ids: the driver's ids of the devices that a worker sees alone, by device name; an id
        means the same GPU in whatever order CUDA counts them.
        findings: the file of what `mlxd doctor` found; None: workers read none. prefix_disk: where
        they keep parts of prompts, as much as they are told to; None: nowhere. prefix_disk_key: the
        file with the key that they encrypt them with, which each reads itself.
        listen: where they listen; None: each on a private Unix socket. further: other options of
        all workers.
        """
        self._command = tuple(command)
        self._environment = own_environment() if environment is None else dict(environment)
        self._stall_timeout_s = stall_timeout_s
        waiting = () if waiting_max is None else ("--waiting-max", str(waiting_max))
        remembered = () if findings is None else ("--findings", str(findings))
        kept: tuple[str, ...] = ()  # by one process alone, as findings are: not by ranks
        if prefix_disk is not None:
            kept = ("--prefix-disk", str(prefix_disk), "--prefix-disk-size", "held")
            if prefix_disk_key is not None:
                kept += ("--prefix-disk-key", str(prefix_disk_key))
        self.arguments = (
            *("--orphan-grace", str(orphan_grace_s), "--log-format", "json"),
            *waiting,
            *remembered,
            *kept,
            *further,
        )
        """The arguments common to all workers."""
        common = ("--orphan-grace", str(orphan_grace_s), "--log-format", "json")
        self._of_ranks = (*common, *waiting, *further)
        self.run_dir = RunDir.temporary() if run_dir is None else run_dir
        self._name = os.urandom(4).hex()  # not a process id: those recur, and files may remain
        self._gpu_ids = dict(gpu_ids or {})
        self._version = importlib.metadata.version("mlxd")
        self._listen = listen
        self._launches = 0

    def close(self) -> None:
        """Remove what this launcher made; only when no worker is left."""
        self.run_dir.close()

    async def launch(self, *, model: str, incarnation: str, device: str = "") -> SubprocessWorker:
        """Start a worker and return it once it listens; see the port."""
        log = _log.bind(model=model, incarnation=incarnation, device=device)
        try:
            check_own_worker()  # otherwise the worker would fail in its first imports
            worker, ready = await self._start(incarnation, device, log)
        except OSError as error:
            raise _start_failed(error, model, f"{self._command[0]}: ") from error
        log.info("worker launched", pid=worker.pid)
        try:
            self._note(worker)
            endpoint = await self._wait_ready(worker, ready, model=model)
        except BaseException as error:
            ready.close()
            await worker.close()
            if isinstance(error, OSError):
                raise _start_failed(error, model) from error
            raise
        # A worker of another version, installed in place meanwhile, may have other checks.
        worker.address = endpoint.address
        worker.proof = endpoint.proof if endpoint.version == self._version else None
        return worker

    async def _start(
        self, incarnation: str, device: str, log: FilteringBoundLogger
    ) -> tuple[SubprocessWorker, PipeReader]:
        """Start the process; return it with its ready pipe's reader. A failure leaves nothing."""
        self._launches += 1
        environment = self._environment
        devices = split_group(device)
        gpu_ids = list(filter(None, (self._gpu_ids.get(name) for name in devices)))
        if gpu_ids:
            environment = {**environment, VISIBLE_VARIABLE: ",".join(gpu_ids)}
        arguments = self.arguments
        if len(devices) > 1:
            arguments = ("--ranks", str(len(devices)), *self._of_ranks)
        files = WorkerFiles(self.run_dir.path, f"{self._name}-{self._launches:x}")
        with ExitStack() as unowned:
            ready, life, output = (
                unowned.enter_context(closing(Pipe(*os.pipe()))) for _ in range(3)
            )
            # Made before the process: nothing may wait between its start and its owner.
            readers = [
                unowned.enter_context(closing(await pipe.reader())) for pipe in (ready, output)
            ]
            process = await child.start(
                (
                    *self._command,
                    *("--listen", self._listen or files.address, "--incarnation", incarnation),
                    *("--ready-fd", str(ready.write_fd), "--life-fd", str(life.read_fd)),
                    *arguments,
                    *(("--device", device) if device else ()),
                ),
                output=output.write_fd,
                pass_fds=(ready.write_fd, life.read_fd),
                environment=environment,
            )
            unowned.pop_all()
        ready.close(ready.write_fd)
        life.close(life.read_fd)
        output.close(output.write_fd)
        worker = SubprocessWorker(
            process, incarnation=incarnation, output=readers[1], life=life, files=files, log=log
        )
        return worker, readers[0]

    def _note(self, worker: SubprocessWorker) -> None:
        """Record a worker, unless it has ended already.

        Raises:
            OSError: the system does not report it.
        """
        mark = mark_of(worker.pid)
        if mark is not None:
            worker.files.write(Record(mark, worker.incarnation, arguments=self.arguments))

    async def _wait_ready(
        self, worker: SubprocessWorker, ready: PipeReader, *, model: str
    ) -> ReadyLine:
        line = asyncio.create_task(_read_line(ready))
        ended = asyncio.create_task(worker.wait_exited())
        try:
            await wait_for_answer({line, ended}, limit_s=self._stall_timeout_s)
            if line.done() and line.result():
                return parse_ready_line(line.result(), model=model)
            if line.done():
                # A worker that ends closes its pipe: this is its end, seen a moment early. The end
                # itself may take as long as the grace for its output.
                await asyncio.wait({ended}, timeout=2 * config.EOF_GRACE_S)
            if ended.done():
                raise e.WorkerExited(model, worker.last_lines(), ended.result())
            if line.done():
                raise e.WorkerStartFailed(model, worker.last_lines())
            raise e.WorkerTimedOut(model, worker.last_lines(), self._stall_timeout_s)
        finally:
            for task in (line, ended):
                task.cancel()
            await asyncio.wait({line, ended})
            ready.close()


def _start_failed(error: OSError, model: str, doing: str = "") -> e.MlxdError:
    """Return why there is no worker: a lack of the machine's, or a fault of the command."""
    short = machine_short(error, f"the worker of {model}")
    return short or e.WorkerStartFailed(model, (f"{doing}{error.strerror or error}",))


async def _read_line(ready: PipeReader) -> bytes:
    """Return the line from the ready pipe; b"" if the pipe ended before a whole line."""
    try:
        line = await ready.stream.readline()
    except ValueError:
        return b"too long"  # over the limit: parse_ready_line refuses it as unreadable
    return line if line.endswith(b"\n") else b""
