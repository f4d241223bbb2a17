"""Small files that several processes write: one writer at a time, and nobody reads half of one."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNERS_ALONE = 0o600


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Keep other writers out by a file that is locked; a process that dies lets them in. Blocks.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNERS_ALONE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_content(path: Path, content: bytes, *, mode: int = OWNERS_ALONE) -> None:
    """Write a file beside `path`, to the disk, and rename it.

    A reader sees the old content or the new one, whenever a process is killed.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    beside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.chmod(mode)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
