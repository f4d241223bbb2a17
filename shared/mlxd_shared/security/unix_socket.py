"""Where a Unix socket may lie, and what may be removed to put one there.

Invariants:
- The socket's folder belongs to the user and to nobody else (0700), so that there is no moment at
  which others could connect; the socket itself becomes 0600.
- Only a socket that nobody listens on is removed. Two servers that start at once take turns: the
  folder is locked from the look to the end of the bind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxd_shared.domain.errors import InvalidRequest

FOLDER_MODE = 0o700
SOCKET_MODE = 0o600


@contextmanager
def claim_socket(path: Path, *, anywhere: bool = False) -> Iterator[None]:
    """Make room for a socket at `path`, which the body binds; then close it to other users.

    `anywhere` leaves both modes to the operator: others may connect where the folder lets them.

    Raises:
        InvalidRequest: the folder is not private, or something that is no stale socket is there.
    """
    try:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _refusal(path.parent, f"cannot hold a socket: {error.strerror}") from error
    try:
        if not anywhere:
            _check_private(path.parent, os.fstat(folder))
        fcntl.flock(folder, fcntl.LOCK_EX)
        _remove_stale(path)
        yield
        if not anywhere:
            path.chmod(SOCKET_MODE)
    finally:
        os.close(folder)


def _check_private(folder: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _refusal(folder, "belongs to another user; a socket's folder must be the server's")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise _refusal(folder, f"is open to other users ({mode}); a socket's folder must be 0700")


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _refusal(path, "exists and is not a socket; it is not removed")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        code = probe.connect_ex(str(path))
    if code != errno.ECONNREFUSED:
        problem = "another server listens on it" if code in {0, errno.EAGAIN} else os.strerror(code)
        raise _refusal(path, problem)
    path.unlink(missing_ok=True)


def _refusal(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest.of("address", f"{path}: {problem}")
