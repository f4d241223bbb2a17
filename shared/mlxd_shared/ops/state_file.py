"""Small files that several processes replace: whole or not there, one writer at a time."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

EVERYBODYS, OWNERS = 0o644, 0o600
"""Who may read a file: its owner alone writes it."""


@contextmanager
def writing_alone(folder: Path, lock_file: str) -> Iterator[None]:
    """Keep other writers out; a process that dies lets them in. The folder is made if need be.

    Raises:
        OSError: the folder or the lock cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNERS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_json(path: Path, content: Mapping[str, object], *, mode: int = EVERYBODYS) -> None:
    """Have a file say `content` as JSON, see `replace_text`.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, json.dumps(content, indent=2) + "\n", mode=mode)


def replace_text(path: Path, text: str, *, mode: int) -> None:
    """Have a file say `text`, see `replace_bytes`.

    Raises:
        OSError: it cannot be written.
    """
    replace_bytes(path, text.encode(), mode=mode)


def replace_bytes(path: Path, content: bytes, *, mode: int = EVERYBODYS) -> None:
    """Have a file hold `content`: that or what it held before, whatever happens meanwhile.

    Raises:
        OSError: it cannot be written.
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
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have the folder's names on the disk, so that a machine that stops keeps the new one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
