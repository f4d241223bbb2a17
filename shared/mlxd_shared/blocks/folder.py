"""The folder of one form's blocks: whose it is, who may see it, and how a file gets into it.

Invariants:
- Prompts can be read from keys and values, so a folder is its user's alone (0700, files 0600); one
  that others can see, or that is somebody else's, is refused rather than changed. With a key what
  is written is encrypted, under names that end in `sealed` (`sealing`).
- One process at a time has a form's folder. The lock goes with the process, however it ends.
- A file is there whole or not at all: it is written beside, reaches the disk, and is renamed. What
  a process that died left beside goes when the next one opens the folder.
- A form's folder is one that stands in the named one, never a link. What is opened is that folder
  and no other: should it be moved, removed or replaced meanwhile, nothing is written elsewhere.
- Folders of forms stand side by side in the folder that the user names, in which nothing else is
  touched. Those of other versions of the layout, which nobody can read any more, go with what they
  hold, unless a process has them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from mlxd_shared.blocks.about import ABOUT_NBYTES_MAX, NOBODY, About, decode_about, encode_about
from mlxd_shared.blocks.block_file import VERSION, BlockRefused, Fault
from mlxd_shared.blocks.index import Entry
from mlxd_shared.blocks.listing import (
    ABOUT_FILE,
    BESIDE,
    FORM_FOLDER,
    LOCK_FILE,
    entry_of,
    folder_name,
    is_form_folder,
    name_of,
)
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.ops.logs import get_logger

FOLDER_MODE, FILE_MODE = 0o700, 0o600
LOCK_WAIT_S = 2.0
"""Whoever makes room in a folder, or is just ending, has it for less."""
LOCK_PAUSE_S = 0.01

_log = get_logger("prefix disk")


class FolderRefused(Exception):
    """A folder that cannot be had for blocks; says why."""


class BlockFolder:
    """One form's files. Open from `open_folder` to `close`; any thread."""

    def __init__(
        self, path: Path, folder_fd: int, lock_fd: int, key: DiskKey | None = None
    ) -> None:
        """Take over a folder, open as `folder_fd`, whose lock is held by `lock_fd`.

        key: what files are encrypted with; None: those that are can only be removed.
        """
        self.path = path
        self.key = key
        self._fd = folder_fd
        self._lock_fd = lock_fd

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock_fd)
        os.close(self._fd)

    def list_blocks(self) -> Iterator[Entry]:
        """Yield what is there by names and sizes; what does not belong there is removed."""
        strays = 0
        with os.scandir(self._fd) as listing:
            for item in listing:
                status = item.stat(follow_symlinks=False)
                entry = entry_of(item.name, status)
                if entry is not None:
                    yield entry
                elif item.name not in (LOCK_FILE, ABOUT_FILE) and not stat.S_ISDIR(status.st_mode):
                    strays += 1
                    with contextlib.suppress(OSError):  # it stays, and counts for nothing
                        os.unlink(item.name, dir_fd=self._fd)
        if strays:
            _log.warning("removed files that are no blocks", count=strays, folder=str(self.path))

    def write(self, entry: Entry, pieces: Iterable[bytes | memoryview]) -> None:
        """Have a file hold `pieces`, whole; encrypted, where the entry says so.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        if entry.sealed:
            assert self.key is not None, "an entry is sealed where its folder has a key"
            pieces = self.key.seal(pieces, place=self._place_of(entry))
        self._write(name_of(entry), pieces, at_s=entry.last_s)

    def describe(self, about: About) -> None:
        """Have the folder say whose it is; that it cannot is no matter."""
        with contextlib.suppress(OSError):
            self._write(ABOUT_FILE, [encode_about(about)], at_s=time.time())

    def about(self) -> About:
        """Return what the folder says of itself."""
        return read_about(self._fd)

    def remove_itself(self) -> None:
        """Remove the folder, where nothing but its own files is in it."""
        with contextlib.suppress(OSError):
            for name in (ABOUT_FILE, LOCK_FILE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._fd)
            self.path.rmdir()

    def _write(self, name: str, pieces: Iterable[bytes | memoryview], *, at_s: float) -> None:
        beside = name + BESIDE
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(beside, flags, FILE_MODE, dir_fd=self._fd)
        try:
            try:
                for piece in pieces:
                    _write_all(descriptor, memoryview(piece))
                os.utime(descriptor, (at_s, at_s))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(beside, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=self._fd)
            raise

    def read(self, entry: Entry, *, nbytes_max: int) -> memoryview:
        """Return a file's bytes, decrypted where they were encrypted.

        Raises:
            BlockRefused: it is no file, not as large as it was, or larger than `nbytes_max`; it is
                encrypted, and not as it was written, or with a key that is not this folder's.
            OSError: it cannot be read, or is gone.
        """
        if entry.nbytes > nbytes_max:
            problem = f"{entry.nbytes} bytes long, at most {nbytes_max}"
            raise BlockRefused(Fault.OVERSIZED, problem)
        if entry.sealed and self.key is None:
            raise BlockRefused(Fault.LOCKED, "encrypted, and there is no key")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name_of(entry), flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise BlockRefused(Fault.FOREIGN, "a link") from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != entry.nbytes:
                problem = f"{status.st_size} bytes long, not {entry.nbytes}"
                raise BlockRefused(Fault.TORN, problem)
            if entry.sealed and self.key is not None:
                fill, place = partial(_read_all, descriptor), self._place_of(entry)
                return self.key.unseal(fill, entry.nbytes, place=place)
            return memoryview(read_bytes(descriptor, entry.nbytes))
        finally:
            os.close(descriptor)

    def touch(self, entry: Entry) -> None:
        """Have the disk remember when a file was used; one that is gone stays gone."""
        with contextlib.suppress(OSError):
            os.utime(name_of(entry), (entry.last_s, entry.last_s), dir_fd=self._fd)

    def remove(self, entry: Entry) -> None:
        """Remove a file; one that is gone, or that cannot be removed, is no matter."""
        with contextlib.suppress(OSError):
            os.unlink(name_of(entry), dir_fd=self._fd)

    def _place_of(self, entry: Entry) -> str:
        return f"{self.path.name}/{name_of(entry)}"


def open_folder(
    root: Path, form_name: bytes, *, wait_s: float = 0.0, key: DiskKey | None = None
) -> BlockFolder:
    """Return the folder of a form's blocks in `root`; both are made if need be.

    wait_s: how long another process may take to let it go. key: what files are encrypted with.

    Raises:
        FolderRefused: it cannot be made or written, is not this user's alone, or another process
            has it.
    """
    path = root / folder_name(form_name)
    try:
        os.close(make_private(root))
        try:
            folder_fd, lock_fd = open_locked(path, os.O_NOFOLLOW, wait_s=wait_s)
        except FileNotFoundError:  # whoever made room in it has just removed it, as empty
            folder_fd, lock_fd = open_locked(path, os.O_NOFOLLOW, wait_s=wait_s)
    except OSError as error:
        raise FolderRefused(f"{path}: {error.strerror or error}") from error
    _remove_old(root)
    return BlockFolder(path, folder_fd, lock_fd, key)


def open_locked(
    path: Path, flags: int = 0, *, wait_s: float = 0.0, owner: str = "process"
) -> tuple[int, int]:
    """Return descriptors of a folder, made if need be, and of its lock.

    owner: what an error calls whoever else has it.

    Raises:
        FolderRefused: another owner has it, or see `make_private`.
        OSError: it cannot be made, opened or locked.
    """
    folder_fd = make_private(path, flags)
    try:
        lock_fd = lock(folder_fd, wait_s=wait_s)
    except OSError:
        os.close(folder_fd)
        raise
    if lock_fd is None:
        os.close(folder_fd)
        raise FolderRefused(f"{path}: another {owner} has it")
    return folder_fd, lock_fd


def make_private(folder: Path, flags: int = 0) -> int:
    """Return a descriptor of a folder that is this user's alone, made if need be.

    Raises:
        FolderRefused: it belongs to another user, or is open to others.
        OSError: it cannot be made or opened.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    descriptor = open_directory(folder, flags)
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and not mode & 0o077:
        return descriptor
    os.close(descriptor)
    if status.st_uid != os.geteuid():
        raise FolderRefused(f"{folder} belongs to another user")
    raise FolderRefused(f"{folder} is open to others (mode {mode:04o}); prompts need 0700")


def open_directory(folder: Path, flags: int = 0) -> int:
    """Return a descriptor of a folder that is there. Raises OSError."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)


def read_about(folder_fd: int) -> About:
    """Return what a folder says of itself; `NOBODY` where it says nothing that can be read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(ABOUT_FILE, flags, dir_fd=folder_fd)
    except OSError:
        return NOBODY
    with os.fdopen(descriptor, "rb") as file:
        try:
            return decode_about(file.read(ABOUT_NBYTES_MAX))
        except OSError:
            return NOBODY


def lock(folder_fd: int, *, wait_s: float = 0.0) -> int | None:
    """Return a descriptor that holds the folder's lock; None where another process keeps it.

    Raises:
        OSError: there can be no lock.
    """
    until_s, pause = time.monotonic() + wait_s, threading.Event()
    while (descriptor := _try_lock(folder_fd)) is None and time.monotonic() < until_s:
        pause.wait(LOCK_PAUSE_S)
    return descriptor


def _try_lock(folder_fd: int) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(LOCK_FILE, flags, FILE_MODE, dir_fd=folder_fd)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.fstat(descriptor).st_nlink > 0
    except BlockingIOError:
        is_there = False
    except OSError:
        os.close(descriptor)
        raise
    if is_there:
        return descriptor
    os.close(descriptor)  # another's, or of a folder that has been removed with it
    return None


def remove_clear_folders(root: Path, form_name: bytes, *, digest: str) -> int:
    """Remove a model's folders in the clear, of any form; return how many files went.

    A folder that a process has stays, and so does a file that cannot be removed, with one line.

    form_name: of a folder that is the model's even if it does not say so. digest: the model's.
    """
    gone = 0
    for folder in _list_folders(root):
        with contextlib.suppress(OSError):  # links, and what cannot be read, are no matter
            if is_form_folder(folder.name) and (
                folder.name == folder_name(form_name) or _is_clear_of(folder, digest)
            ):
                gone += _remove_unless_locked(folder)
    return gone


def _is_clear_of(folder: Path, digest: str) -> bool:
    """Tell whether a folder says that it is this model's, and has no key."""
    folder_fd = open_directory(folder, os.O_NOFOLLOW)
    try:
        about = read_about(folder_fd)
    finally:
        os.close(folder_fd)
    return about.digest == digest and not about.key


def _list_folders(root: Path) -> list[Path]:
    folders: list[Path] = []
    with contextlib.suppress(OSError):  # what cannot be listed is no matter
        folders += root.iterdir()
    return folders


def _remove_old(root: Path) -> None:
    """Remove the folders of other versions of the layout, unless somebody has them."""
    for folder in _list_folders(root):
        match = FORM_FOLDER.fullmatch(folder.name)
        if match is None or int(match[1]) == VERSION:
            continue
        with contextlib.suppress(OSError):  # links, and what cannot be removed, are no matter
            if _remove_unless_locked(folder):
                _log.warning("removed blocks of another version", folder=str(folder))


def _remove_unless_locked(folder: Path) -> int:
    """Return how many files of a folder went, but for its own; it goes with the last of them.

    Raises:
        OSError: it cannot be opened, locked or listed.
    """
    folder_fd = open_directory(folder, os.O_NOFOLLOW)
    try:
        lock_fd = lock(folder_fd)
        if lock_fd is None:
            return 0
        with contextlib.closing(BlockFolder(folder, os.dup(folder_fd), lock_fd)) as own:
            with os.scandir(folder_fd) as listing:
                names = [item.name for item in listing if item.name not in (LOCK_FILE, ABOUT_FILE)]
            left = 0
            for name in names:
                try:
                    os.unlink(name, dir_fd=folder_fd)
                except OSError:  # nothing else stays for it
                    left += 1
            if left:
                _log.warning("cannot remove files", left=left, folder=str(folder))
            else:
                own.remove_itself()
            return len(names) - left
    finally:
        os.close(folder_fd)


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def read_bytes(descriptor: int, nbytes: int) -> bytes:
    """Return a file's next bytes; raises BlockRefused where there are fewer.

    No buffer is made for them: it would be zeroed under the interpreter's lock, 8 MiB in 4 to 7 ms.
    """
    pieces: list[bytes] = []
    while nbytes:
        piece = os.read(descriptor, nbytes)
        if not piece:
            raise BlockRefused(Fault.TORN, f"{nbytes} bytes short")
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)


def _read_all(descriptor: int, room: memoryview) -> None:
    while room:
        count = os.readv(descriptor, [room])
        if not count:
            raise BlockRefused(Fault.TORN, f"{len(room)} bytes short")
        room = room[count:]
