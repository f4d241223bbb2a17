"""Where this process's output goes: a named pipe that its new controller reads."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from mlxd_shared.domain.errors import InvalidRequest

OUTPUT_FDS = (1, 2)


@contextmanager
def new_output(path: str) -> Iterator[None]:
    """Open the named pipe `path`; when the body has succeeded, stdout and stderr go into it.

    An empty path changes nothing.

    Raises:
        InvalidRequest: it is no named pipe of this user, or nobody reads from it.
    """
    if not path:
        yield
        return
    fd = _open(path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
            raise InvalidRequest.of("output_path", f"{path} is no named pipe of this user")
        yield
        os.set_blocking(fd, True)  # as a pipe that is inherited: what is written is not lost
        for output in OUTPUT_FDS:
            os.dup2(fd, output)
    finally:
        os.close(fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InvalidRequest.of("output_path", f"{path}: {error}") from error
