"""What a test keeps of a row by itself, where a worker schedules captures."""

from __future__ import annotations

from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.kept.snapshot import Snapshot


def snapshots_of(contents: RowContents, row: RowId, start: int) -> dict[Kind, Snapshot]:
    """Return snapshots of every kind; empty where nothing lies between."""
    return contents._keep_all(row, max(start, 0), contents.offset(row))


def copy_out(snapshot: Snapshot) -> None:
    """Copy a lazy snapshot out; nothing happens to an owned one."""
    snapshot.check_open()
    if snapshot.lazy:
        snapshot._book.copy_out([snapshot])
