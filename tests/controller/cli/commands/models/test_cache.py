"""`mlxd cache` without a server: the folder itself is listed, emptied and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.root import open_root
from tests.shared.blocks.made_blocks import chain_of, files_in, open_blocks
from tests.support.cli import Ran, mlxd

NOWHERE = ("--address", "127.0.0.1:1")


async def cache(folder: Path, *words: str) -> Ran:
    """Run a command on a folder that no server has."""
    return await mlxd(*NOWHERE, "cache", *words, "--prefix-disk-folder", str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three blocks of one model."""
    folder = tmp_path / "prefixes"
    store = open_blocks(folder)
    store.describe(About("org/kept", "0123456789abcdef", "F32", 4096, "cpu", "mlx 1"))
    assert all(store.write(block) for block in chain_of(1, 3))
    store.close()
    return folder


@pytest.mark.asyncio
async def test_what_is_there_is_listed_and_summed(folder: Path) -> None:
    """By model, with blocks and bytes; a folder that is not there holds nothing and is not made."""
    nbytes = sum(path.stat().st_size for path in files_in(folder))
    listed = await cache(folder, "list")
    assert listed.code == 0
    assert listed.rows[1][:5] == ["org/kept", "0123456789ab", "F32", "4096", "3"]
    (summed,) = (await cache(folder, "size", "--json")).objects
    assert summed == {"nbytes": nbytes, "budget_nbytes": None}
    nowhere = folder.with_name("nowhere")
    (empty,) = (await cache(nowhere, "size", "--json")).objects
    assert empty["nbytes"] == 0
    assert not nowhere.exists()


@pytest.mark.asyncio
async def test_a_model_or_all_are_dropped(folder: Path) -> None:
    """A model of which nothing is kept is no success and removes nothing; no name means all."""
    unknown = await cache(folder, "drop", "other")
    assert unknown.code == 3
    assert len(files_in(folder)) == 3
    (dropped,) = (await cache(folder, "drop", "org/kept", "--json")).objects
    assert dropped["blocks"] == 3
    assert files_in(folder) == []
    assert (await cache(folder, "drop")).code == 0


@pytest.mark.asyncio
async def test_damage_is_found_and_said(folder: Path) -> None:
    """A flipped bit is one file less, and a failure; what is sound passes."""
    assert (await cache(folder, "verify")).out == "org/kept: 3 sound\n"
    first = files_in(folder)[0]
    raw = bytearray(first.read_bytes())
    raw[len(raw) // 2] ^= 4
    first.write_bytes(raw)
    damaged = await cache(folder, "verify")
    assert (damaged.code, damaged.out) == (1, "org/kept: 2 sound, 1 damaged and removed\n")
    assert (await cache(folder, "verify")).code == 0


@pytest.mark.asyncio
async def test_a_folder_in_use_is_not_touched(folder: Path) -> None:
    """While a server has the folder and cannot be asked, nothing is removed, and it is said why."""
    root = open_root(folder)
    refused = await cache(folder, "drop")
    root.close()
    assert refused.code == 2
    assert "another server has it" in refused.err
    assert len(files_in(folder)) == 3


@pytest.mark.asyncio
async def test_what_a_worker_has_stays(folder: Path) -> None:
    """A worker that runs by itself keeps its blocks; the command says whose they are."""
    held = open_blocks(folder)
    dropped = await cache(folder, "drop")
    held.close()
    assert "a worker has it" in dropped.err
    assert len(files_in(folder)) == 3
