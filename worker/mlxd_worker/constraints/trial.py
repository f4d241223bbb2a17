"""The process in which a grammar is tried out before this worker's own library sees it.

The library cannot be interrupted, and what it meets in a grammar may cost it hours, or the stack.
So a grammar is compiled here first, over a vocabulary of single bytes, by a process that can be
killed and that limits itself.

Protocol: a grammar comes in as its size in bytes on a line, then its text; out goes one line of
JSON, the reason why it is refused, or an empty text. The process ends with its input.

Invariants:
- It imports the library and nothing else of the worker; it holds no secret and opens nothing.
- It outlives neither its worker nor the time that a trial may take, whoever else is gone.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from typing import BinaryIO, Final

from llguidance import LLMatcher, LLTokenizer

from mlxd_shared import config
from mlxd_worker.constraints.library import LIMITS

BYTES: Final = 256
_STRIDE: Final = 7
"""Takes the walk to other bytes than the first that is allowed."""


WALK_BYTES: Final = 64
"""So much output is made up under a grammar, to see whether it stays within its limits."""


def tried(tokenizer: LLTokenizer, source: str) -> str:
    """Return why a grammar is refused; an empty text where it is good."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    for step in range(WALK_BYTES):
        if matcher.is_stopped():  # at its end, or in error
            break
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(BYTES) if mask[i >> 3] >> (i & 7) & 1]
        if not allowed or matcher.is_error():
            break
        matcher.consume_token(allowed[_STRIDE * step % len(allowed)])
    return matcher.get_error()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Try out every grammar that comes, until none does."""
    tokenizer = LLTokenizer("byte")
    while line := requests.readline():
        source = requests.read(int(line)).decode()
        signal.alarm(int(config.CONSTRAINT_COMPILE_S) + 1)
        answers.write(json.dumps(tried(tokenizer, source)).encode() + b"\n")
        answers.flush()
        signal.alarm(0)


def main() -> None:
    """Serve standard input, within bounds of its own."""
    limit_nbytes = config.CONSTRAINT_TRIAL_BYTES_MAX
    with contextlib.suppress(ValueError, OSError):  # not everywhere; the worker's clock still is
        resource.setrlimit(resource.RLIMIT_AS, (limit_nbytes, limit_nbytes))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, meant for the worker
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
