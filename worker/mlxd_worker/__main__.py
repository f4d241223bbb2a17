"""`python -m mlxd_worker`: logs, the backend and its BLAS, and only then what imports MLX."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.ops import logs
from mlxd_worker.app import serve, write_ready
from mlxd_worker.distributed.group import make_group
from mlxd_worker.machine.backend import Backend, prepare_backend
from mlxd_worker.machine.blas import THREADS_VARIABLE
from mlxd_worker.machine.cores import available_cores
from mlxd_worker.process.exit_code import ExitCode
from mlxd_worker.process.interpreter import SWITCH_INTERVAL_S
from mlxd_worker.process.options import Options, parse_options
from mlxd_worker.thread.engine_thread import MakeHost

if TYPE_CHECKING:
    from mlxd_worker.thread.host import ModelHost

TOKENIZERS_VARIABLE = "TOKENIZERS_PARALLELISM"

_log = logs.get_logger("worker")


def main() -> None:
    """Run a worker; exits with an `ExitCode`."""
    try:
        options = parse_options()
    except InvalidRequest as error:
        sys.stderr.write(f"mlxd-worker: {error.describe()}\n")
        sys.exit(ExitCode.BAD_OPTIONS)
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.exit(run(options))


def run(options: Options, *, make_host: MakeHost | None = None) -> ExitCode:
    """Run a worker to its end; every reason not to start goes to the ready pipe and the log."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    unwanted = threading.Event()
    try:
        backend = _prepare(options)
        if options.ranks > 1 and make_host is None:
            make_host = _leader(options, backend.kind, unwanted)
        gc.freeze()  # what was imported stays: a full collection would keep the engine waiting
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(options, backend, make_host=make_host, unwanted=unwanted))
    except MlxdError as error:
        reason = error.describe()
        _log.error("cannot start", error=type(error).__name__, reason=reason)
        write_ready(options.ready_fd, {"error": reason, "kind": type(error).__name__})
        return ExitCode.CANNOT_START


def _prepare(options: Options) -> Backend:
    threads = options.threads
    if options.ranks > 1:  # all of them together have what one has, or they wait for each other
        threads = max((threads or available_cores()) // options.ranks, 1)
    if threads is not None:
        os.environ[THREADS_VARIABLE] = str(threads)
    # Each text on the thread that asks: on the library's own, a short one would wait for long ones.
    os.environ.setdefault(TOKENIZERS_VARIABLE, "false")
    return prepare_backend()


def _leader(options: Options, kind: DeviceKind, unwanted: threading.Event) -> MakeHost:
    """Return what makes the host of several ranks, on the engine thread, where MLX may be.

    This process's environment says from now on that it is the first of them. unwanted: is set once
    the process is told to stop.

    Raises:
        BackendProblem: there are no such ranks here.
    """
    group = make_group(options.ranks, kind)
    os.environ.update(group.environment(0))
    arguments = ("--log-level", options.log_level, "--log-format", options.log_format)

    def make(device: DeviceKind) -> ModelHost:
        from mlxd_worker.distributed.leader import LeaderHost  # noqa: PLC0415 - imports MLX

        return LeaderHost(device, group=group, arguments=arguments, unwanted=unwanted)

    return make


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory where it is installed: streams cost half as much on it."""
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
