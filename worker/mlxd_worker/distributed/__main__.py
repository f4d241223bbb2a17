"""`python -m mlxd_worker.distributed`: a follower, started by its leader and by nobody else."""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from mlxd_shared.ops import logs
from mlxd_worker.machine.backend import prepare_backend
from mlxd_worker.process.interpreter import SWITCH_INTERVAL_S


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
    for number in (signal.SIGTERM, signal.SIGINT):  # the leader ends first, and its followers then
        signal.signal(number, signal.SIG_IGN)
    backend = prepare_backend()
    from mlxd_worker.distributed.follower import follow  # noqa: PLC0415 - after the BLAS
    from mlxd_worker.distributed.frames import Wire  # noqa: PLC0415

    wire = Wire(socket.socket(fileno=options.fd))
    follow(wire, rank=options.rank, ranks=options.ranks, device=backend.kind)


if __name__ == "__main__":
    main()
