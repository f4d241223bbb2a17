"""The child's side: it answers questions on its standard input until that ends.

A message in a pipe is its size in bytes on a line, then its bytes.

Invariants:
- It holds no secret and opens nothing; it imports what answers, and nothing else of the worker.
- Its address space is bounded: beyond that an allocation fails, and most often the child with it.
- It outlives neither its worker nor the time that an answer may take, whoever else is gone: its
  own alarm goes off later than the worker's clock.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO


def serve(answer_to: Callable[[bytes], bytes], *, limit_s: float, memory_nbytes_max: int) -> None:
    """Answer every question that comes, until none does.

    limit_s: what the pool gives an answer, which its alarm is never before.
    memory_nbytes_max: of address space, what is in use now included.
    """
    with contextlib.suppress(ValueError, OSError):  # not everywhere; the worker's clock still is
        resource.setrlimit(resource.RLIMIT_AS, (memory_nbytes_max, memory_nbytes_max))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, meant for the worker
    while (question := read_message(sys.stdin.buffer)) is not None:
        signal.alarm(int(limit_s) + 1)
        write_message(sys.stdout.buffer, answer_to(question))
        signal.alarm(0)


def write_message(stream: IO[bytes], message: bytes) -> None:
    """Write a message and flush it; raises BrokenPipeError if nobody reads any more."""
    stream.write(b"%d\n" % len(message))
    stream.write(message)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """Return the next message, waiting for it; None where the stream ends before its end."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    size = int(line)
    message = stream.read(size)
    return message if len(message) == size else None
