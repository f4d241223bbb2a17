"""The interface of every store of models: names, and where the model of each is.

Directory listings are sorted and bounded, and never follow a link that leads out of the store.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from mlxd_controller.runtime.ports import StoreKind
from mlxd_models.files.model_files import machine_short
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.ops.logs import get_logger

OF_THE_DISK = frozenset({errno.EIO, errno.ESTALE})
"""Errors of one disk or mount alone: the other stores are still listed."""
_log = get_logger("store")
_NAME = re.compile(r"[\w][\w.:@+/-]*")


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a store and where it leads: a folder or manifest, or its error."""

    name: str
    path: Path
    kind: StoreKind = StoreKind.FOLDER
    error: MlxdError | None = None


class Shelf(Protocol):
    """One store. Every method blocks on the disk, and sees its current state."""

    @property
    def kind(self) -> StoreKind:
        """The kind of store."""

    def places(self) -> Iterable[Place]:
        """Return every name of a model that might be served, or that is damaged.

        Models that are plainly for others (other formats, other kinds) are left out.
        """

    def find(self, name: str) -> Place | None:
        """Return the place of a name, listed or not; None if there is no such name.

        A problem with it is in the place's error.
        """


def is_name(text: str) -> bool:
    """Return whether a text is a valid name of a model."""
    return len(text) <= config.MODEL_NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


def check_name(name: str) -> None:
    """Refuse an invalid name.

    Raises:
        InvalidRequest: it is too long, empty, or has characters that no name has.
    """
    if not is_name(name):
        limit = f"1 to {config.MODEL_NAME_CHARS_MAX} letters, digits and ._:@+/-"
        raise InvalidRequest.of("name", f"{name!r} is not {limit}")


def entries(folder: Path) -> list[str]:
    """Return the names in a directory; none if it does not exist or cannot be accessed.

    Hidden names are skipped, as are unprintable ones, which could not be requested.

    Raises:
        MachineShort: the machine lacks the open files or memory for it.
    """
    try:
        with os.scandir(folder) as entries_of_folder:
            names = [
                entry.name
                for entry in islice(entries_of_folder, config.FOLDER_ENTRIES_MAX + 1)
                if entry.name.isprintable() and not entry.name.startswith(".")
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        short = machine_short(error, folder.name)
        if short is not None and error.errno not in OF_THE_DISK:
            raise short from error
        _log.warning("cannot list", path=str(folder), reason=error.strerror)
        return []
    if len(names) > config.FOLDER_ENTRIES_MAX:
        entries_max = config.FOLDER_ENTRIES_MAX
        _log.warning("skipping further entries", path=str(folder), entries_max=entries_max)
    return sorted(names[: config.FOLDER_ENTRIES_MAX])


# Unlike Path's methods these return False if access is denied.
is_folder, is_file = os.path.isdir, os.path.isfile
