"""The keeper with a key: what is in the clear goes, what other keys have locked stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.prefixes.keeper import open_keeper
from mlxd_controller.settings import DiskBudget
from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.domain.errors import BadCredentials
from tests.shared.blocks.made_blocks import chain_of, files_in, open_blocks
from tests.support.disk_keys import secret_of, write_key

BUDGET = 1 << 20
KEY, OTHER = DiskKey(secret_of(1)), DiskKey(secret_of(2))


def fill(folder: Path, key: DiskKey | None) -> None:
    """Leave three blocks of nobody's, encrypted with a key."""
    store = open_blocks(folder, key=key)
    store.describe(About(model="m", key="" if key is None else key.id.hex()))
    assert all(store.write(block) for block in chain_of(1, 3, key=key))
    store.close()


@pytest.mark.asyncio
async def test_with_a_key_nothing_stays_in_the_clear(tmp_path: Path) -> None:
    """What nobody has goes with a line; what a worker has, once it has let it go. What another key
    has encrypted stays, and is said once.
    """
    folder = tmp_path / "prefixes"
    for key in (KEY, OTHER, None):
        fill(folder, key)
    keeper = open_keeper(DiskBudget(folder, BUDGET, write_key(tmp_path / "key")))
    held = open_blocks(folder)
    with capture_logs() as logs:
        for _ in range(2):
            await keeper.share_out([], Metrics())
    assert len(held) == 3 == len([path for path in files_in(folder) if path.suffix != ".sealed"])
    held.close()
    with capture_logs() as later:
        for _ in range(2):
            await keeper.share_out([], Metrics())
    events = [log["event"] for log in (*logs, *later)]
    assert events == [
        "blocks are locked by another key", "removing blocks in the clear", "removed blocks"
    ]  # fmt: skip
    assert logs[0]["folders"] == 1
    assert {path.suffix for path in files_in(folder)} == {".sealed"}
    assert len(files_in(folder)) == 6
    assert {each.is_encrypted for each in keeper.accounts([]) if each.blocks} == {True}
    checks = [each async for each in keeper.verify()]
    assert sorted((each.sound, each.locked) for each in checks) == [(0, 3), (3, 0)]
    keeper.close()


@pytest.mark.asyncio
async def test_a_stray_in_the_clear_costs_nothing_that_is_encrypted(tmp_path: Path) -> None:
    """Whoever's key it was: it may come back. Of one block both files count, by themselves."""
    folder = tmp_path / "prefixes"
    for key in (KEY, OTHER):
        fill(folder, key)
    encrypted = files_in(folder)
    for path in encrypted[::3]:
        path.with_suffix(".safetensors").write_bytes(b"clear")
    keeper = open_keeper(DiskBudget(folder, BUDGET, write_key(tmp_path / "key")))
    await keeper.share_out([], Metrics())
    assert files_in(folder) == encrypted
    assert sum(each.blocks for each in keeper.accounts([])) == 6
    keeper.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("key", [None, OTHER], ids=["clear", "encrypted"])
async def test_what_was_left_of_writing_is_in_the_clear_too(
    tmp_path: Path, key: DiskKey | None
) -> None:
    """A killed worker has left part of a prompt. It goes, and what is encrypted stays."""
    folder = tmp_path / "prefixes"
    fill(folder, key)
    first, *others = files_in(folder)
    left = first.with_suffix(".safetensors.part")
    first.rename(left)
    for path in others if key is None else ():
        path.unlink()
    keeper = open_keeper(DiskBudget(folder, BUDGET, write_key(tmp_path / "key")))
    with capture_logs() as logs:
        await keeper.share_out([], Metrics())
    assert "removing blocks in the clear" in [log["event"] for log in logs]
    assert not left.exists()
    assert files_in(folder) == ([] if key is None else others)
    assert left.parent.exists() is (key is not None)
    keeper.close()


@pytest.mark.asyncio
async def test_what_is_encrypted_is_nothing_in_the_clear(tmp_path: Path) -> None:
    """Nor is a part of it, nor what a folder says of itself: nothing is removed, nor said."""
    folder = tmp_path / "prefixes"
    fill(folder, KEY)
    files_in(folder)[0].with_suffix(".sealed.part").write_bytes(b"x")
    keeper = open_keeper(DiskBudget(folder, BUDGET, write_key(tmp_path / "key")))
    with capture_logs() as logs:
        await keeper.share_out([], Metrics())
    assert (logs, len(files_in(folder))) == ([], 3)
    keeper.close()


@pytest.mark.asyncio
async def test_without_a_key_what_is_locked_stays(tmp_path: Path) -> None:
    """One line says that nobody can read it; it counts for the budget, and makes room like all."""
    folder = tmp_path / "prefixes"
    fill(folder, KEY)
    fill(folder, None)
    keeper = open_keeper(DiskBudget(folder, BUDGET))
    with capture_logs() as logs:
        for _ in range(2):
            await keeper.share_out([], Metrics())
    assert [log["event"] for log in logs] == ["blocks are locked by another key"]
    assert len(files_in(folder)) == 6
    assert sorted(account.is_encrypted for account in keeper.accounts([])) == [False, True]
    dropped = await keeper.drop(None, [])
    assert dropped.blocks == 6
    assert files_in(folder) == []
    keeper.close()


def test_a_key_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    """By the file's name; the folder is not taken, and a server with a good key may have it."""
    folder = tmp_path / "prefixes"
    loose = write_key(tmp_path / "loose", mode=0o604)
    for path in (tmp_path / "none", loose):
        with pytest.raises(BadCredentials, match=path.name):
            open_keeper(DiskBudget(folder, BUDGET, path))
    open_keeper(DiskBudget(folder, BUDGET, write_key(tmp_path / "key"))).close()
