"""What the files of a form's folder are, by names and sizes alone.

Invariants:
- A file is a block's, the folder's own, or a stray: what a process that died left beside, or what
  somebody else put there. Nothing is opened to tell.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

from mlxd_shared.blocks.block_file import VERSION, BlockId, Part
from mlxd_shared.blocks.chain import NAME_NBYTES
from mlxd_shared.blocks.index import Entry

FORM_DIGITS = 32
"""Of a form's name, in its folder's."""
BESIDE, SEALED = ".part", ".sealed"
"""How names end of what is being written, and of blocks that are encrypted."""
LOCK_FILE = "lock"
ABOUT_FILE = "about.json"
"""Whose blocks the folder has; see `about`."""
OWN_FILES = frozenset({LOCK_FILE, ABOUT_FILE, ABOUT_FILE + BESIDE})
"""In which no prompt is."""
DEPTH_DIGITS_MAX = 9

FORM_FOLDER = re.compile(rf"v(\d{{1,6}})-[0-9a-f]{{{FORM_DIGITS}}}")
_BLOCK_FILE = re.compile(
    rf"([0-9a-f]{{{2 * NAME_NBYTES}}})-(\d{{1,{DEPTH_DIGITS_MAX}}})"
    rf"-({'|'.join(Part)})\.(safetensors|sealed)"
)


def folder_name(form_name: bytes) -> str:
    """Return what the folder of a form is called."""
    return f"v{VERSION}-{form_name.hex()[:FORM_DIGITS]}"


def is_form_folder(name: str) -> bool:
    """Tell whether a name is one of a form's folder, of this layout."""
    match = FORM_FOLDER.fullmatch(name)
    return match is not None and int(match[1]) == VERSION


def list_entries(folder_fd: int) -> Iterator[Entry]:
    """Yield the blocks of a folder by names and sizes; what goes meanwhile is left out."""
    with os.scandir(folder_fd) as listing:
        for item in listing:
            with contextlib.suppress(FileNotFoundError):
                entry = entry_of(item.name, item.stat(follow_symlinks=False))
                if entry is not None:
                    yield entry


def count_in_clear(folder_fd: int) -> int:
    """Return how many files of a folder may hold a prompt that is not encrypted.

    Blocks, and what was left of writing one: all but the folder's own files, and encrypted ones.
    """
    encrypted = (SEALED, SEALED + BESIDE)
    with os.scandir(folder_fd) as listing:
        return sum(
            item.name not in OWN_FILES
            and not item.name.endswith(encrypted)
            and not item.is_dir(follow_symlinks=False)
            for item in listing
        )


def entry_of(name: str, status: os.stat_result) -> Entry | None:
    """Return what a name and a size say of a block; None of what is no block's file."""
    match = _BLOCK_FILE.fullmatch(name)
    if not match or not stat.S_ISREG(status.st_mode) or not status.st_size:
        return None
    block = BlockId(bytes.fromhex(match[1]), Part(match[3]))
    sealed = match[4] == "sealed"
    return Entry(block, int(match[2]), status.st_size, status.st_mtime, sealed=sealed)


def name_of(entry: Entry) -> str:
    """Return what the file of a block is called."""
    kind = "sealed" if entry.sealed else "safetensors"
    return f"{entry.id.name.hex()}-{entry.depth}-{entry.id.part}.{kind}"
