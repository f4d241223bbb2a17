"""Writes blocks in processes that are killed at random points, and counts what became of them.

Run as `python -m tests.shared.blocks.killed_writer FOLDER KILLS`; prints one JSON object. A child
is killed by the system at a byte (no file may grow beyond it), or kills itself before one of the
calls that Python audits: opening, renaming, setting times. What it has finished writing it says
through a pipe; the parent opens the folder after each death and reads everything.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from mlxd_shared.blocks.block_file import file_nbytes
from tests.shared.blocks.made_blocks import (
    AMPLE,
    chain_of,
    contents_of,
    files_in,
    open_blocks,
)

CHAIN = chain_of(3, 64, values=512)
FILE_NBYTES = file_nbytes(CHAIN[0])
BUDGET_NBYTES = 20 * FILE_NBYTES
FILES_MAX = 40
AUDITED = ("open", "os.rename", "os.utime", "os.remove")


def kill_at_byte(at: int) -> None:
    """Have this process die with the write that makes a file longer than that."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))


def kill_at_call(at: int) -> None:
    """Have this process die before its call of that number, of those that are audited."""
    left = at

    def count(event: str, _: tuple[Any, ...]) -> None:
        nonlocal left
        if event in AUDITED:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def write_all(folder: Path, first: int, budget_nbytes: int, say: int) -> None:
    """Write blocks from `first` on, saying which are written, until death or the last."""
    store = open_blocks(folder, budget_nbytes=budget_nbytes)
    for number in range(first, len(CHAIN)):
        if store.write(CHAIN[number]):
            os.write(say, bytes([number]))


def run_child(folder: Path, draws: random.Random, *, budget_nbytes: int) -> tuple[bool, int | None]:
    """Return whether a child was killed, and which block it had written last."""
    hear, say = os.pipe()
    by_byte, first = draws.random() < 0.5, draws.randrange(len(CHAIN) - 8)
    at = draws.randrange(FILE_NBYTES) if by_byte else draws.randrange(20)
    child = os.fork()
    if not child:
        os.close(hear)
        (kill_at_byte if by_byte else kill_at_call)(at)
        write_all(folder, first, budget_nbytes, say)
        os._exit(0)
    os.close(say)
    with os.fdopen(hear, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), said[-1] if said else None


def main() -> None:
    """Kill, look, and tell."""
    folder, kills, draws = Path(sys.argv[1]), int(sys.argv[2]), random.Random(11)
    counts = dict.fromkeys(("killed", "wrong", "lost", "refused", "left", "over"), 0)
    for _ in range(kills):
        budget_nbytes = draws.choice((AMPLE, BUDGET_NBYTES))
        killed, last = run_child(folder, draws, budget_nbytes=budget_nbytes)
        counts["killed"] += killed
        store = open_blocks(folder, budget_nbytes=budget_nbytes)
        if budget_nbytes == AMPLE:  # else it may have made room for the next one
            counts["lost"] += last is not None and store.nbytes_of(CHAIN[last].id) is None
        counts["over"] += store.nbytes > budget_nbytes
        known = len(store)
        for block in CHAIN:
            if store.nbytes_of(block.id) is not None:
                counts["wrong"] += contents_of(store.read(block.id)) != contents_of(block)
        counts["refused"] += sum(store.counts.refused.values())
        counts["left"] += len(list(folder.glob("v*/*"))) - known - 1  # the lock
        store.close()
        if known > FILES_MAX:
            for path in files_in(folder):
                path.unlink()
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
