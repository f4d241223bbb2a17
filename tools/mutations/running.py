"""Run a command with a limit, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT_CHARACTERS_MAX = 4000

MEMORY_NBYTES_MAX = 16 << 30
"""Of addresses, for each process: a mutant that never stops collecting fails, and nobody else."""

_LIMITED = 'ulimit -v "$1" 2>/dev/null || true; shift; exec "$@"'
"""macOS has no such limit and goes without."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended: its status, None where it ran past its limit, and its last words."""

    status: int | None
    output: str


def run(
    command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], limit_s: float
) -> Done:
    """Run a command in a session of its own, and kill all of that when the time is over.

    Its output goes through a file: a process that it has left behind would hold a pipe open.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _LIMITED, "sh", str(MEMORY_NBYTES_MAX >> 10), *command],
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Done(status, text[-OUTPUT_CHARACTERS_MAX:])
