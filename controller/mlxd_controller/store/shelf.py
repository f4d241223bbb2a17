"""What every store of models offers: names, and where the model of each lies.

What lies in a directory of a store is sorted, bounded, and never behind a link that leads out.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlxd_controller.runtime.ports import StoreKind
from mlxd_models.files.model_files import machine_short
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.ops.logs import get_logger

OF_THE_DISK = frozenset({errno.EIO, errno.ESTALE})
"""What one disk or mount says of itself: others are listed all the same."""
_log = get_logger("store")
_NAME = re.compile(r"[\w][\w.:@+/-]*")


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a store and what it leads to: a folder or manifest, or what is wrong with it."""

    name: str
    path: Path
    kind: StoreKind = StoreKind.FOLDER
    error: MlxdError | None = None


class Shelf(Protocol):
    """One store. Every method blocks on the disk, and sees it as it is then."""

    @property
    def kind(self) -> StoreKind:
        """Which kind of store it is."""

    def places(self) -> Iterable[Place]:
        """Return every name of a model that might be served, or that is damaged.

        What is plainly for others (other formats, other kinds of models) is left out.
        """

    def find(self, name: str) -> Place | None:
        """Return where the model of a name lies, listed or not; None: there is no such name.

        What is wrong with it comes as the place's error.
        """


def is_name(text: str) -> bool:
    """Return whether a model may be called so."""
    return len(text) <= config.MODEL_NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


def check_name(name: str) -> None:
    """Refuse what no model may be called.

    Raises:
        InvalidRequest: too long, empty, or characters that no name has.
    """
    if not is_name(name):
        limit = f"1 to {config.MODEL_NAME_CHARS_MAX} letters, digits and ._:@+/-"
        raise InvalidRequest.of("name", f"{name!r} is not {limit}")


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
                for _, entry in zip(
                    range(config.FOLDER_ENTRIES_MAX + 1), entries_of_folder, strict=False
                )
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
    if len(names) > config.FOLDER_ENTRIES_MAX:
        _log.warning(
            "the rest is left out", path=str(folder), entries_max=config.FOLDER_ENTRIES_MAX
        )
    return sorted(names[: config.FOLDER_ENTRIES_MAX])


# Unlike the methods of Path these answer False where the system lets nobody look.
is_folder, is_file = os.path.isdir, os.path.isfile
