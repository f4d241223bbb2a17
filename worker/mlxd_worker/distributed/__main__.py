"""`python -m mlxd_worker.distributed`: a follower, started by its leader and by nobody else."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys

from mlxd_shared.ops import logs
from mlxd_worker.distributed.group import STOP_SIGNALS
from mlxd_worker.machine.backend import prepare_backend
from mlxd_worker.process.exit_code import ExitCode
from mlxd_worker.process.interpreter import SWITCH_INTERVAL_S

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Follow the leader at the other end of `--fd` until either ends."""
    parser = argparse.ArgumentParser(prog="mlxd-rank")
    for name in ("--fd", "--rank", "--ranks"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--log-level", choices=list(logs.LEVELS), default="info")
    parser.add_argument("--log-format", choices=["auto", "json", "console"], default="auto")
    options = parser.parse_args()
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for number in STOP_SIGNALS:  # held back until here: see `Followers`
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    backend = prepare_backend()
    from mlxd_worker.distributed.follower import follow  # noqa: PLC0415 - after the BLAS
    from mlxd_worker.distributed.frames import Wire  # noqa: PLC0415

    wire = Wire(socket.socket(fileno=options.fd))
    follow(wire, rank=options.rank, ranks=options.ranks, device=backend.kind)


def end_with_parent() -> None:
    """Have the kernel kill this process with its leader: one that is stopped hears nothing.

    Source: prctl(2), Linux alone; elsewhere ranks are not served.
    """
    leader = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != leader:  # it ended before that
        os._exit(ExitCode.ENGINE_FAILED)


if __name__ == "__main__":
    main()
