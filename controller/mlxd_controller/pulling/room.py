"""What of a disk stays free: one reserve for all that mlxd fetches, from hubs or from machines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from mlxd_shared.config import PULL_RESERVE_BYTES
from mlxd_shared.domain.errors import StoreFull
from mlxd_shared.domain.units import format_bytes

FreeOf = Callable[[Path], int]
"""Returns the bytes that are free where a folder is or would be."""


def free_nbytes(folder: Path) -> int:
    """Return the bytes that are free where a folder is or would be."""
    return shutil.disk_usage(_existing_parent(folder)).free


def check_room(where: str, free: int, needed: int) -> None:
    """Refuse what a disk cannot hold beside PULL_RESERVE_BYTES, before any of it comes.

    where: the disk, as people know it. free, needed: bytes.

    Raises:
        StoreFull: naming what is free, needed and in reserve.
    """
    if needed and needed + PULL_RESERVE_BYTES > free:
        raise StoreFull(
            f"{where} has {format_bytes(free)} free, {format_bytes(needed)} are needed, and "
            f"{format_bytes(PULL_RESERVE_BYTES)} stay in reserve"
        )


def check_reserve(where: str, free: int) -> None:
    """Stop before a disk is full: others that had room at their start, as this one, fill it too.

    Raises:
        StoreFull: less than PULL_RESERVE_BYTES is free.
    """
    if free < PULL_RESERVE_BYTES:
        raise StoreFull(
            f"{where} has {format_bytes(free)} free, and {format_bytes(PULL_RESERVE_BYTES)} stay "
            "in reserve; what has arrived stays for the next time"
        )


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
