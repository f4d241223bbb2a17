"""A child that does what its questions say, for the tests of the pool."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from mlxd_worker.killable.process import serve


def answer_to(question: bytes) -> bytes:
    """Do what a question says first; answer the rest of it."""
    verb, _, rest = question.partition(b" ")
    match verb:
        case b"pid":
            return b"%d" % os.getpid()
        case b"say":
            return rest
        case b"read":  # waits for whoever writes
            return Path(rest.decode()).read_bytes()
        case b"fill":
            return b"%d" % len(bytes(int(rest)))
        case b"interrupt":
            os.kill(os.getppid(), signal.SIGUSR1)
            threading.Event().wait()
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"half":
            os.write(sys.stdout.fileno(), b"99\nand no more")
            os._exit(0)
        case b"hang":
            threading.Event().wait()
    raise AssertionError(question)


if __name__ == "__main__":
    serve(answer_to, limit_s=float(sys.argv[1]), memory_nbytes_max=int(sys.argv[2]))
