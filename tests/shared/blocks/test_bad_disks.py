"""Folders that are not as they should be, and disks that are full, read-only or gone."""

from __future__ import annotations

import errno
import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.blocks.block_file import VERSION, file_nbytes
from mlxd_shared.blocks.folder import FolderRefused
from mlxd_shared.blocks.listing import BESIDE
from mlxd_shared.blocks.store import BlockStore
from tests.shared.blocks.made_blocks import (
    AMPLE,
    FILE_NBYTES_MAX,
    FORM_NAME,
    chain_of,
    contents_of,
    files_in,
    open_blocks,
    refuse,
)

CHAIN = chain_of(1, 6)
FILE_NBYTES = file_nbytes(CHAIN[0])


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as a full disk does: the system refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def refusing(folder: Path, fault: int) -> BlockStore:
    """Return a store on what is in a folder that takes nothing more."""
    return BlockStore(
        refuse(folder, FORM_NAME, fault),
        FORM_NAME,
        budget_nbytes=AMPLE,
        file_nbytes_max=FILE_NBYTES_MAX,
        check=lambda _: None,
        clock=lambda: 1_000_000.0,
    )


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_see_is_refused(tmp_path: Path, mode: int) -> None:
    """By name and mode, and left as it is: prompts can be read from keys and values."""
    folder = tmp_path / "blocks"
    folder.mkdir()
    folder.chmod(mode)

    with pytest.raises(FolderRefused, match=f"{mode:04o}"):
        open_blocks(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """Where a file stands in its way, say."""
    (tmp_path / "blocks").write_text("a file")

    with pytest.raises(FolderRefused, match="blocks"):
        open_blocks(tmp_path / "blocks")


def test_what_is_no_block_goes_when_the_folder_is_opened(tmp_path: Path) -> None:
    """What a process that died left beside, links, empty and foreign files; with one line."""
    open_blocks(tmp_path / "blocks").close()
    (form,) = (tmp_path / "blocks").iterdir()
    name = f"{CHAIN[0].id.name.hex()}-0-entries.safetensors"
    (form / (name + BESIDE)).write_bytes(b"half")
    (form / "notes.txt").write_text("mine")
    (form / name).symlink_to(tmp_path / "elsewhere")
    (form / name.replace("entries", "state")).touch()
    (form / "folder").mkdir()

    with capture_logs() as logs:
        store = open_blocks(tmp_path / "blocks")

    assert (len(store), store.nbytes) == (0, 0)
    assert sorted(path.name for path in form.iterdir()) == ["folder", "lock"]
    assert [(log["event"], log["count"]) for log in logs] == [
        ("removed files that are no blocks", 4)
    ]
    store.close()


def test_nothing_else_in_the_named_folder_is_touched(tmp_path: Path) -> None:
    """Only folders of other versions of the layout go, where nobody has them."""
    folder = tmp_path / "blocks"
    held = open_blocks(folder)
    (form,) = folder.iterdir()
    this = f"v{VERSION}-" + "c" * 32
    for name in ("v0-" + "a" * 32, f"v{VERSION + 1}-" + "b" * 32, this, "v0-mine", "photos"):
        (folder / name).mkdir()
        (folder / name / "x.safetensors").write_bytes(b"x")
    (folder / ("v0-" + "d" * 32)).symlink_to(folder / "photos")
    held.close()

    with capture_logs() as logs:
        open_blocks(folder).close()

    left = {path.name for path in folder.iterdir()}
    assert left == {form.name, this, "v0-mine", "photos", "v0-" + "d" * 32}
    assert (folder / "photos" / "x.safetensors").exists()
    assert [log["event"] for log in logs] == ["removed blocks of another version"] * 2


def test_a_full_disk_ends_the_growth(tmp_path: Path) -> None:
    """With one line and no trace of the block; what is there is served, and may be replaced."""
    store = open_blocks(tmp_path / "blocks")
    for block in CHAIN[:3]:
        store.write(block)

    with capture_logs() as logs, at_most(FILE_NBYTES // 2):
        assert not store.write(CHAIN[3])

    assert [log["event"] for log in logs] == ["the disk is full"]
    assert store.budget_nbytes == store.nbytes == 3 * FILE_NBYTES
    assert {path.suffix for path in files_in(tmp_path / "blocks")[0].parent.iterdir()} == {
        "",
        ".safetensors",
    }
    assert contents_of(store.read(CHAIN[0].id)) == contents_of(CHAIN[0])
    assert store.write(CHAIN[4])
    assert store.nbytes <= 3 * FILE_NBYTES
    store.close()


def test_a_new_budget_tries_a_full_disk_again(tmp_path: Path) -> None:
    """It may have room by now; that it was full is not said twice."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    with capture_logs() as logs:
        with at_most(FILE_NBYTES // 2):
            assert not store.write(CHAIN[1])
            store.set_budget(AMPLE)
            assert not store.write(CHAIN[2])
        assert store.budget_nbytes == FILE_NBYTES
        store.set_budget(AMPLE)
        assert store.write(CHAIN[3])

    assert (store.budget_nbytes, store.nbytes) == (AMPLE, 2 * FILE_NBYTES)
    assert [log["event"] for log in logs] == ["the disk is full"]
    store.close()


def test_a_disk_that_cannot_be_written_to_ends_the_writing(tmp_path: Path) -> None:
    """With one line; what is there is served."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    store.close()

    store = refusing(tmp_path / "blocks", errno.EROFS)
    with capture_logs() as logs:
        assert [store.write(block) for block in CHAIN[1:]] == [False] * 5
        assert contents_of(store.read(CHAIN[0].id)) == contents_of(CHAIN[0])

    assert [log["event"] for log in logs] == ["blocks are not written any more"]
    assert not store.writable
    store.close()


def test_a_folder_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    """With one line for the writing; another one of its name is somebody else's, and stays so."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    shutil.rmtree(tmp_path / "blocks")
    other = open_blocks(tmp_path / "blocks")

    with capture_logs() as logs:
        assert store.read(CHAIN[0].id) is None
        assert [store.write(block) for block in CHAIN] == [False] * len(CHAIN)
    assert [log["event"] for log in logs] == ["blocks are not written any more"]
    store.close()

    assert (len(other), files_in(tmp_path / "blocks")) == (0, [])
    assert other.write(CHAIN[0])
    other.close()


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """A form's folder that is a link: what it leads to is not tidied up, however private it is."""
    open_blocks(tmp_path / "blocks").close()
    (form,) = (tmp_path / "blocks").iterdir()
    elsewhere = form.rename(tmp_path / "keys")
    (elsewhere / "id").write_text("a key")
    form.symlink_to(elsewhere)

    with pytest.raises(FolderRefused, match=form.name):
        open_blocks(tmp_path / "blocks")
    assert (elsewhere / "id").read_text() == "a key"


def test_a_disk_that_stays_full_says_so_once(tmp_path: Path) -> None:
    """While others take what it gives back; what is left of it is sound."""
    store = open_blocks(tmp_path / "blocks")
    for block in CHAIN[:3]:
        store.write(block)
    store.close()

    store = refusing(tmp_path / "blocks", errno.ENOSPC)
    with capture_logs() as logs:
        assert [store.write(block) for block in CHAIN[3:]] == [False] * 3

    assert [log["event"] for log in logs] == ["the disk is full"]
    assert store.nbytes <= store.budget_nbytes <= 3 * FILE_NBYTES
    assert len(files_in(tmp_path / "blocks")) == len(store)
    for block in CHAIN[:3]:
        if store.nbytes_of(block.id) is not None:
            assert contents_of(store.read(block.id)) == contents_of(block)
    store.close()
