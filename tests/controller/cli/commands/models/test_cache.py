"""`mlxd cache` without a server: the folder itself is listed, emptied and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd.v1 import model_pb2, status_pb2
from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.root import RootFolder
from tests.fakes.mlxd_server import Answers, serving
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
    root = RootFolder(folder)
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


@pytest.mark.asyncio
async def test_a_server_with_another_folder_is_not_asked(folder: Path) -> None:
    """A folder that is named is the one that is emptied, and never a server's other one."""
    async with serving(Answers(statuses=[keeping()])) as fake:
        named = ("--prefix-disk-folder", str(folder))
        dropped = await mlxd("--address", fake.address, "cache", "drop", *named)
        assert dropped.out.startswith("3 files removed")
        assert not any(isinstance(each, model_pb2.DropPrefixesRequest) for each in fake.requests)
    assert files_in(folder) == []


def keeping() -> status_pb2.Status:
    """Return what a server says that keeps prompts on disk."""
    folder = status_pb2.PrefixFolder(
        form="v1-0", model="m", model_digest="ab" * 32, bytes=3 << 20, blocks=3, in_use=True
    )
    store = status_pb2.PrefixStore(path="/p", budget_bytes=1 << 30, bytes=3 << 20, folders=[folder])
    return status_pb2.Status(prefix_store=store)


@pytest.mark.asyncio
async def test_a_server_that_has_the_folder_is_asked() -> None:
    """It lists, drops one model's or all, and checks; the folder itself is not looked at."""
    answers = Answers(
        statuses=[keeping()],
        dropped=model_pb2.DropPrefixesResponse(blocks=3, bytes=3 << 20),
        verified=[model_pb2.VerifyPrefixesResponse(model="m", sound=2, removed=1)],
    )
    async with serving(answers) as fake:
        own = ("--address", fake.address, "cache")
        assert (await mlxd(*own, "list")).rows[1][-2:] == ["3.0 MiB", "in use"]
        assert (await mlxd(*own, "size")).out == "3.0 MiB of 1.0 GiB in /p\n"
        assert (await mlxd(*own, "drop", "m")).out == "3 files removed, 3.0 MiB\n"
        assert (await mlxd(*own, "drop")).code == 0
        checked = await mlxd(*own, "verify")
    assert (checked.code, checked.out) == (1, "m: 2 sound, 1 damaged and removed\n")
    drops = [each for each in fake.requests if isinstance(each, model_pb2.DropPrefixesRequest)]
    assert [(each.model, each.all) for each in drops] == [("m", False), ("", True)]
