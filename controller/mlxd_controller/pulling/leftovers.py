"""What the hub's library leaves in the cache when its process is killed: files that none resumes.

The library writes a file of Xet storage under a name that no other process would know, holds a lock
of its blob meanwhile, and removes the file if the download fails. A kill leaves it for good.
"""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

from mlxd_shared.ops.logs import get_logger

LOCKS = ".locks"
_LEFTOVER = re.compile(r"(?P<blob>[0-9a-f]{40}|[0-9a-f]{64})\.[0-9a-f]+\.incomplete")
_log = get_logger("pulling")


def drop_leftovers(folder: Path) -> None:
    """Remove what nobody writes any more from a repository's folder in the cache.

    A file that may not be removed stays, and is logged: it harms nothing but the disk.
    """
    locks = folder.parent / LOCKS / folder.name
    for path in sorted((folder / "blobs").glob("*.incomplete")):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        try:
            _drop_unlocked(path, locks / f"{match['blob']}.lock")
        except OSError as error:
            _log.warning("a leftover stays", path=str(path), reason=error.strerror)


def _drop_unlocked(path: Path, lock: Path) -> None:
    """Remove a file unless somebody holds its lock; whoever comes next begins another file."""
    if not lock.exists():
        path.unlink(missing_ok=True)
        return
    with lock.open("rb") as held:
        try:
            fcntl.flock(held.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        path.unlink(missing_ok=True)
