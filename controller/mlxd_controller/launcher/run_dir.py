"""The folder for the workers' sockets and records: private, and one controller's at a time.

The controller holds a lock on a file in it, which the system releases however the controller ends.
Only names of this module's pattern are ever read or removed there. A default folder is named after
the served address alone, so that the next controller with the same options finds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlxd_controller.launcher.records import SUFFIXES, WorkerFiles
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.net import parse_address

FOLDER_MODE = 0o700
PREFIX = "mlxd-"
SHORT_TEMPORARY_DIR = Path("/tmp")  # noqa: S108 - only private folders are made in it
NAME_CHARS_MAX = 40
LOCK_NAME = "lock"
LOCK_TRIES_MAX = 10
STEM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{1,8}")
"""The names of a worker's files: an id for the launcher, and a number."""
RUN_DIR_BYTES_MAX = config.UNIX_PATH_BYTES_MAX - len("/") - len("ffffffff-ffffffff.sock")
"""The longest run_dir to which the name of any launch's socket can be appended."""
_log = get_logger("launcher")


class RunDir:
    """A folder that this controller owns until close()."""

    def __init__(self, path: Path, *, lock_fd: int | None, removed: bool) -> None:
        """Own a private folder; `removed`: delete it with all its contents at the end."""
        self.path = path
        self._lock_fd = lock_fd
        self._removed = removed

    @classmethod
    def temporary(cls) -> RunDir:
        """Return a new folder that no other controller will find, deleted at the end.

        The system creates it with mode 0700 under an unpredictable name: where temporary files go,
        or in /tmp if that path is too long for sockets.
        """
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if not _has_room(path):
            path.rmdir()
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHORT_TEMPORARY_DIR))
        return cls(path, lock_fd=None, removed=True)

    @classmethod
    def claim(cls, path: Path, *, removed: bool = False, served: str = "") -> RunDir:
        """Own `path`, creating it and making it private; `removed`: delete it, and its parent.

        served: the address that the folder is named after; "" if the operator named the folder.

        Raises:
            InvalidRequest: it cannot be created, belongs to others, leaves no room for a socket's
                name, or another controller holds it.
        """
        if not _has_room(path):
            raise _refusal(path, f"longer than {RUN_DIR_BYTES_MAX} bytes")
        for _ in range(LOCK_TRIES_MAX):
            if removed:
                _make_private(path.parent)
            _make_private(path)
            lock_fd = _lock(path, served=served)
            if lock_fd is not None:
                return cls(path, lock_fd=lock_fd, removed=removed)
        raise _refusal(path, "other controllers keep creating and removing it")

    def stems(self) -> tuple[str, ...]:
        """Return the stems of the workers' files here, sorted."""
        named = (path.name.partition(".") for path in self.path.iterdir())
        ours = {stem for stem, _, end in named if STEM.fullmatch(stem) and end in SUFFIXES}
        return tuple(sorted(ours))

    def close(self) -> None:
        """Remove the contents and release the folder; only when no worker is left."""
        if self._removed:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._lock_fd is not None:
                with suppress(OSError):  # others use the parent
                    self.path.parent.rmdir()
        else:
            for stem in self.stems():
                WorkerFiles(self.path, stem).remove()
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def open_run_dir(path: Path | None, *, address: str, environment: Mapping[str, str]) -> RunDir:
    """Return the run directory of a controller that serves at `address`.

    path: the operator's choice; None means the default for that address.

    Raises:
        InvalidRequest: see RunDir.claim.
    """
    if path is not None:  # a link that the operator made is followed
        return RunDir.claim(path.resolve() if path.is_symlink() else path)
    name = name_of(address)
    if name is None:
        return RunDir.temporary()
    try:
        parent = default_parent(environment)
        _make_private(parent)
    except InvalidRequest as error:
        # Another process with that name must not prevent serving.
        _log.warning("run directory is temporary: a restart will reload", reason=str(error))
        return RunDir.temporary()
    return RunDir.claim(parent / name, removed=True, served=address)


def name_of(address: str) -> str | None:
    """Return the folder's name for a served address; None if the system chooses its port.

    Raises:
        InvalidRequest: it is not an address.
    """
    target = parse_address(address).target
    if target.endswith(":0"):
        return None
    readable = re.sub(r"[^0-9A-Za-z.]+", "-", target).strip("-")
    if target.startswith("unix:") or len(readable) > NAME_CHARS_MAX:
        return hashlib.sha256(target.encode()).hexdigest()[:16]
    return readable


def default_parent(environment: Mapping[str, str]) -> Path:
    """Return the folder of this user's run directories."""
    runtime = Path(environment.get("XDG_RUNTIME_DIR", ""))
    longest = runtime / "mlxd" / ("x" * NAME_CHARS_MAX)
    if runtime.is_absolute() and _is_own(runtime) and _has_room(longest):
        return longest.parent
    return SHORT_TEMPORARY_DIR / f"{PREFIX}{os.geteuid()}"


def _is_own(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _make_private(path: Path) -> None:
    """Create the folder, or make an existing one private."""
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        # Opened first, so that what is checked is what is changed, and not a link of others.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise _refusal(path, "it belongs to another user")
        if status.st_mode & stat.S_ISVTX:  # like /tmp: making it private would lock everybody out
            raise _refusal(path, "it is shared by all users; name a folder inside it")
        if stat.S_IMODE(status.st_mode) != FOLDER_MODE:
            os.fchmod(folder, FOLDER_MODE)
    finally:
        os.close(folder)


def _lock(path: Path, *, served: str) -> int | None:
    """Lock a folder and return the descriptor; None if its last holder has just removed it.

    served: as for `RunDir.claim`.

    Raises:
        InvalidRequest: another controller holds it.
    """
    file = path / LOCK_NAME
    try:
        lock_fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(file, error.strerror or str(error)) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(lock_fd), file.stat())
    except BlockingIOError:
        holder = os.read(lock_fd, 32).decode(errors="replace").strip()
        os.close(lock_fd)
        raise _held_by_other(path, f"another controller (process {holder})", served) from None
    except FileNotFoundError:
        same = False
    if not same:
        os.close(lock_fd)
        return None
    try:
        os.ftruncate(lock_fd, 0)
        os.write(lock_fd, f"{os.getpid()}\n".encode())
    except OSError as error:  # a full disk
        os.close(lock_fd)
        raise _refusal(file, f"cannot be written: {error.strerror}") from error
    return lock_fd


def _has_room(path: Path) -> bool:
    return len(os.fsencode(path)) <= RUN_DIR_BYTES_MAX


def _held_by_other(path: Path, holder: str, served: str) -> InvalidRequest:
    """Return the refusal of a folder that `holder` has, with what to do about it."""
    if served:  # a --run-dir of its own would only lead to a port in use
        problem = f"{holder} serves {served}; stop that one, or give this one another --address"
        return InvalidRequest.of("address", problem)
    advice = "stop that one, or give this one a --run-dir of its own"
    return _refusal(path, f"{holder} has it; {advice}")


def _refusal(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest.of("run_dir", f"{path}: {problem}")
