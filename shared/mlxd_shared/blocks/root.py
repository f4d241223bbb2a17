"""The folder that all models' blocks are in: whose it is, what is there, and what nobody has.

Invariants:
- One owner at a time: a controller, or a command while no controller runs. Its lock is beside the
  folders of forms, goes with the process, and is no worker's affair.
- What a worker has is listed by names and sizes, and never removed here, but for files that are
  damaged: whoever has the folder takes a file that is gone for a miss.
- Folders are changed under their own lock, for a moment. Nothing is followed that is a link.
- What is encrypted with a key that is not at hand is neither sound nor damaged, for all that can be
  told: it is counted, and left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlxd_shared.blocks.about import NOBODY, About
from mlxd_shared.blocks.block_file import HEADER_NBYTES_MAX, BlockRefused, Fault, decode
from mlxd_shared.blocks.folder import (
    BlockFolder,
    FolderRefused,
    lock,
    open_directory,
    open_locked,
    read_about,
)
from mlxd_shared.blocks.index import BlockIndex, Entry
from mlxd_shared.blocks.listing import count_in_clear, is_form_folder, list_entries
from mlxd_shared.blocks.sealing import DiskKey

FILE_NBYTES_MAX = (1 << 32) + HEADER_NBYTES_MAX
"""Of a block that is looked at without its model: none that exists is near."""


@dataclass(frozen=True, slots=True)
class FormFolder:
    """One form's folder, as it is by names and sizes."""

    form: str
    """Its name."""
    about: About = NOBODY
    blocks: int = 0
    """Files."""
    nbytes: int = 0
    last_s: float = 0.0
    """When any of it was used last; seconds since the epoch."""
    least_worth: float = 0.0
    """Seconds that a byte of what would go first saves in a second."""
    is_held: bool = False
    """Whether a process has it."""
    is_encrypted: bool = False
    """Whether it has blocks, and all are encrypted."""
    in_clear: int = 0
    """Files that may hold a prompt which is not encrypted, what was left of writing them too."""


@dataclass(slots=True)
class Findings:
    """What a check of files has found."""

    form: str
    about: About = NOBODY
    sound: int = 0
    refused: dict[Fault, int] = field(default_factory=dict)
    """Files that were removed, by what was wrong."""
    unread: int = 0
    """Files that the disk would not give."""
    locked: int = 0
    """Files that were not checked, because the key that they need is not at hand."""


class RootFolder:
    """The folder, owned until `close`; any thread, one at a time."""

    def __init__(self, path: Path, key: DiskKey | None = None) -> None:
        """Have the folder, made if need be, as this process's own.

        key: what blocks that are encrypted are checked with.

        Raises:
            FolderRefused: it cannot be made or written, is not this user's alone, or another
                process owns it.
        """
        self.path = path
        self.key = key
        try:
            self._fd, self._lock_fd = open_locked(path, owner="server")
        except OSError as error:
            raise FolderRefused(f"{path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Let others have it."""
        os.close(self._lock_fd)
        os.close(self._fd)

    def forms(self) -> list[str]:
        """Return the names of the folders that are there."""
        with os.scandir(self._fd) as listing:
            names = [item.name for item in listing if item.is_dir(follow_symlinks=False)]
        return sorted(filter(is_form_folder, names))

    def survey(self, form: str, *, clock: Callable[[], float] = time.time) -> FormFolder:
        """Return what a form's folder has; nothing where it is gone."""
        with self._open(form) as folder_fd:
            if folder_fd is None:
                return FormFolder(form)
            about, index, last_s, now_s = read_about(folder_fd), BlockIndex(), 0.0, clock()
            blocks_in_clear = 0
            for entry in list_entries(folder_fd):
                index.add(entry)
                blocks_in_clear += not entry.sealed
                # One from the future, after a clock was put back, says nothing of its use.
                last_s = max(last_s, min(entry.last_s, now_s))
            return FormFolder(
                form,
                about,
                blocks=len(index),
                nbytes=index.nbytes,
                last_s=last_s,
                least_worth=index.least_worth(now_s) * about.block_s if len(index) else 0.0,
                is_held=_is_held(folder_fd),
                is_encrypted=len(index) > 0 and not blocks_in_clear,
                in_clear=count_in_clear(folder_fd),
            )

    def trim(
        self, form: str, keep_nbytes: int, *, clock: Callable[[], float] = time.time
    ) -> int | None:
        """Remove what is worth least of a folder until it has so much; return the bytes removed.

        One of which nothing stays goes itself. None where a process has it.
        """

        def choose(entries: list[Entry]) -> list[Entry]:
            index, doubles = BlockIndex(), []
            for entry in entries:
                if index.get(entry.id) is None:
                    index.add(entry)
                else:  # of two that say they are one block, one is kept
                    doubles.append(entry)
            return [
                *doubles,
                *index.choose_victims(0, budget_nbytes=keep_nbytes, now_s=clock()),
            ]

        return self._remove(form, choose)

    def remove_clear(self, form: str) -> int | None:
        """Remove what is not encrypted in a folder; return as `trim` does. What is, stays."""
        return self._remove(form, lambda entries: [each for each in entries if not each.sealed])

    def _remove(self, form: str, choose: Callable[[list[Entry]], list[Entry]]) -> int | None:
        """Remove strays, and the blocks that are chosen; see `trim`."""
        with self._open(form) as folder_fd:
            if folder_fd is None:
                return 0
            lock_fd = lock(folder_fd)
            if lock_fd is None:
                return None
            folder = BlockFolder(self.path / form, os.dup(folder_fd), lock_fd)
            with contextlib.closing(folder):
                entries = list(folder.list_blocks())
                victims = choose(entries)
                for entry in victims:
                    folder.remove(entry)
                if len(victims) == len(entries):
                    folder.remove_itself()
                return sum(entry.nbytes for entry in victims)

    def verify(self, form: str, *, until: Callable[[], bool] = lambda: False) -> Findings:
        """Read every file of a folder, remove those that are no sound blocks, and say what was.

        Those that are encrypted with a key that is not at hand stay, and are counted.

        until: what tells that nobody wants to know any more; the rest is left unread then.
        """
        findings = Findings(form)
        with self._open(form) as folder_fd:
            if folder_fd is None:
                return findings
            findings.about = read_about(folder_fd)
            own_key = "" if self.key is None else self.key.id.hex()
            is_foreign = findings.about.key not in ("", own_key)
            folder = BlockFolder(self.path / form, os.dup(folder_fd), os.dup(folder_fd), self.key)
            with contextlib.closing(folder):
                for entry in list_entries(folder_fd):
                    if until():
                        break
                    if entry.sealed and (is_foreign or not own_key):
                        findings.locked += 1
                        continue
                    try:
                        self._check(folder, entry)
                    except FileNotFoundError:
                        continue  # it made room meanwhile
                    except OSError:
                        findings.unread += 1
                    except BlockRefused as refused:
                        if refused.fault is Fault.LOCKED and findings.about.key != own_key:
                            findings.locked += 1
                            continue
                        folder.remove(entry)
                        count = findings.refused.get(refused.fault, 0)
                        findings.refused[refused.fault] = count + 1
                    else:
                        findings.sound += 1
        return findings

    def _check(self, folder: BlockFolder, entry: Entry) -> None:
        """Read one file. Raises OSError, or BlockRefused."""
        raw = folder.read(entry, nbytes_max=FILE_NBYTES_MAX)
        name_key = self.key.name_key if self.key is not None and entry.sealed else b""
        digits = folder.path.name.partition("-")[2]
        decode(raw, form_digits=digits, wanted=entry.id, name_key=name_key)

    @contextlib.contextmanager
    def _open(self, form: str) -> Iterator[int | None]:
        """Open a form's folder around the body; None where there is none."""
        if not is_form_folder(form):
            yield None
            return
        try:
            folder_fd = open_directory(self.path / form, os.O_NOFOLLOW)
        except OSError:
            yield None
            return
        try:
            yield folder_fd
        finally:
            os.close(folder_fd)


def _is_held(folder_fd: int) -> bool:
    """Tell whether a process has a form's folder."""
    try:
        lock_fd = lock(folder_fd)
    except OSError:
        return False
    if lock_fd is None:
        return True
    os.close(lock_fd)
    return False
