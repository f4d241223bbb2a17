"""What was typed in chats, so that the arrow keys bring it back in the next one.

A file of one JSON text a line, oldest first, which only its user reads. Several chats share it.

Invariants:
- A line is there whole or not at all for who reads: one that a killed process tore is passed over,
  and the next one begins anew behind it.
- It has at most HISTORY_ENTRIES_MAX entries and HISTORY_BYTES_MAX bytes, once a chat has begun; an
  entry longer than HISTORY_ENTRY_CHARS_MAX is not kept.
- A file that cannot be read or written costs the history, and no chat.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import History

from mlxd_shared import config
from mlxd_shared.ops.state_file import OWNERS, replace_text, writing_alone

LOCK_SUFFIX = ".lock"


class HistoryFile(History):
    """The history that prompt_toolkit asks, in a file. Blocks on the disk."""

    def __init__(self, path: Path, *, on_problem: Callable[[str], None]) -> None:
        """Take the file; `on_problem` is called once if it cannot be used."""
        super().__init__()
        self._path = path
        self._on_problem = on_problem
        self._is_usable = True

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, the latest first; a file that is too large is cut."""
        try:
            with writing_alone(self._path.parent, self._path.name + LOCK_SUFFIX):
                entries, is_too_large = read_entries(self._path)
                if is_too_large:
                    replace_text(self._path, _lines(entries), mode=OWNERS)
        except OSError as error:
            self._give_up(error)
            return []
        return entries[::-1]

    def store_string(self, string: str) -> None:
        """Append an entry."""
        if not self._is_usable or len(string) > config.HISTORY_ENTRY_CHARS_MAX:
            return
        try:
            with writing_alone(self._path.parent, self._path.name + LOCK_SUFFIX):
                _append(self._path, _lines([string]).encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._is_usable:
            self._is_usable = False
            self._on_problem(f"{self._path}: no history is kept: {error.strerror}")


def read_entries(path: Path) -> tuple[list[str], bool]:
    """Return the entries that may stay, oldest first, and whether the file has more than these.

    Raises:
        OSError: it cannot be read; one that is not there is empty.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - config.HISTORY_BYTES_MAX))
            lines = file.read(config.HISTORY_BYTES_MAX).split(b"\n")
    except FileNotFoundError:
        return [], False
    entries = [entry for entry in map(_parse, lines) if entry is not None]
    is_too_large = size > config.HISTORY_BYTES_MAX or len(entries) > config.HISTORY_ENTRIES_MAX
    return entries[-config.HISTORY_ENTRIES_MAX :], is_too_large


def _parse(line: bytes) -> str | None:
    """Return the text that a line holds; None for a torn one."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, str) else None


def _lines(entries: Iterable[str]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def _append(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, OWNERS)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if is_torn else line)
    finally:
        os.close(descriptor)
