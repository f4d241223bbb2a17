"""What is removed from folders of blocks, and what is said of files that cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.blocks.folder import CANNOT_REMOVE, remove_folder
from mlxd_shared.blocks.root import RootFolder
from mlxd_shared.blocks.sealing import DiskKey
from tests.shared.blocks.made_blocks import FORM_NAME, chain_of, files_in, open_blocks
from tests.support.disk_keys import secret_of

KEY = DiskKey(secret_of(1))


def fill(folder: Path, key: DiskKey | None = None) -> list[Path]:
    """Leave four blocks; return their files."""
    store = open_blocks(folder, key=key)
    assert all(store.write(block) for block in chain_of(1, 4, key=key))
    store.close()
    return files_in(folder)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of files that the system does not remove, for tests to add to."""
    names: set[str] = set()
    unlink = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if path in names:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    return names


def lines_of(logs: Iterable[Mapping[str, object]]) -> list[tuple[object, object]]:
    """Return what was logged, each with how many files it is about."""
    return [(log["event"], log.get("count", log.get("left"))) for log in logs]


def test_one_file_that_stays_keeps_no_other(tmp_path: Path, kept: set[str]) -> None:
    """What can go of a folder goes and is counted; the rest is said. Later it goes whole."""
    files = fill(tmp_path)
    kept.add(files[0].name)
    (files[0].parent / "folder").mkdir()
    with capture_logs() as logs:
        assert remove_folder(tmp_path, FORM_NAME) == 3
    assert lines_of(logs) == [(CANNOT_REMOVE, 2)]
    assert files_in(tmp_path) == files[:1]
    kept.clear()
    (files[0].parent / "folder").rmdir()
    assert remove_folder(tmp_path, FORM_NAME) == 1
    assert list(tmp_path.glob("v*")) == []


def test_a_trim_counts_what_went(tmp_path: Path, kept: set[str]) -> None:
    """In bytes; a folder with something left in it stays, and is known as before."""
    files = fill(tmp_path)
    nbytes = [path.stat().st_size for path in files]
    kept.add(files[0].name)
    root = RootFolder(tmp_path)
    with capture_logs() as logs:
        assert root.trim(files[0].parent.name, 0) == sum(nbytes[1:])
    assert lines_of(logs) == [(CANNOT_REMOVE, 1)]
    assert root.survey(files[0].parent.name).nbytes == nbytes[0]
    root.close()


def test_a_store_counts_what_went(tmp_path: Path, kept: set[str]) -> None:
    """When it makes room, and when it removes what is not as the others are; said once each."""
    files = fill(tmp_path, KEY)
    kept.add(files[0].name)
    store = open_blocks(tmp_path, key=KEY)
    with capture_logs() as logs:
        store.set_budget(0)
    assert store.counts.evicted == 3
    assert lines_of(logs) == [(CANNOT_REMOVE, 1)]
    store.close()

    clear = [files[0].with_name(f"{'0' * 63}{n}-0-entries.safetensors") for n in range(3)]
    for path in clear:
        path.write_bytes(b"clear")
    kept.add(clear[0].name)
    with capture_logs() as logs:
        open_blocks(tmp_path, key=KEY).close()
    assert lines_of(logs) == [(CANNOT_REMOVE, 1), ("removed blocks in the clear", 2)]
    assert files_in(tmp_path) == [clear[0], files[0]]


def test_strays_are_counted_as_they_went(tmp_path: Path, kept: set[str]) -> None:
    """Those that stay are said apart, and hold nothing up."""
    files = fill(tmp_path)
    for name in ("a", "b", "c"):
        (files[0].parent / name).write_bytes(b"x")
    kept.add("a")
    with capture_logs() as logs:
        store = open_blocks(tmp_path)
    assert lines_of(logs) == [("removed files that are no blocks", 2), (CANNOT_REMOVE, 1)]
    assert len(store) == 4
    store.close()
