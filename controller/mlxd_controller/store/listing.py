"""What lies in a directory of a store: sorted, bounded, and never behind a link that leads out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mlxd_models.files.model_files import machine_short
from mlxd_shared.config import FOLDER_ENTRIES_MAX
from mlxd_shared.ops.logs import get_logger

_log = get_logger("store")

OF_THE_DISK = frozenset({errno.EIO, errno.ESTALE})
"""What one disk or mount says of itself: others are listed all the same."""


def entries(folder: Path) -> list[str]:
    """Return the names in a directory; none where there is no directory, or none to be looked at.

    Hidden names are nobody's, and those that are no text could not be asked for.

    Raises:
        MachineShort: the machine lacks the open files or the memory that it takes to look.
    """
    try:
        with os.scandir(folder) as entries_of_folder:
            names = [
                entry.name
                for _, entry in zip(range(FOLDER_ENTRIES_MAX + 1), entries_of_folder, strict=False)
                if entry.name.isprintable() and not entry.name.startswith(".")
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        short = machine_short(error, folder.name)
        if short is not None and error.errno not in OF_THE_DISK:
            raise short from error
        _log.warning("not looked into", path=str(folder), reason=error.strerror)
        return []
    if len(names) > FOLDER_ENTRIES_MAX:
        _log.warning("the rest is left out", path=str(folder), entries_max=FOLDER_ENTRIES_MAX)
    return sorted(names[:FOLDER_ENTRIES_MAX])


def is_folder(path: Path) -> bool:
    """Return whether there is a directory."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Return whether there is a file."""
    try:
        return path.is_file()
    except OSError:
        return False
