"""A server that encrypts prompts on disk: they outlive it under the key, and under no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_shared.blocks.chain import BLOCK_TOKENS
from tests.shared.blocks.made_blocks import files_in
from tests.support.cli import mlxd
from tests.support.disk_keys import secret_of, write_key
from tests.support.kept_on_disk import SLOW
from tests.support.random_model import write_dense_model
from tests.system.test_prefix_disk import Models, serving


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two models of which a block is worth keeping."""
    return Models(
        write_dense_model(tmp_path_factory.mktemp("slow"), shape=SLOW),
        write_dense_model(tmp_path_factory.mktemp("other"), shape=SLOW, seed=9),
    )


@pytest.mark.asyncio
async def test_an_encrypted_prompt_outlives_its_server(models: Models, tmp_path: Path) -> None:
    """A restart with the key reads it with equal tokens; one with another key computes it, and
    nothing is in the clear at any time. Status says so; the log never has the key.
    """
    folder, key = tmp_path / "prefixes", write_key(tmp_path / "key")
    async with serving(folder, models, "--prefix-disk-key", str(key)) as session:
        cold, _ = await session.ask()
        await session.wait_for_share()
        await session.write_all()
        status = await session.read()
        assert [each.encrypted for each in status.prefix_store.folders] == [True]
        assert (await session.worker()).prefix_disk.encrypted
        log = session.server.log_path.read_text()
    async with serving(folder, models, "--prefix-disk-key", str(key)) as session:
        assert await session.ask() == (cold, BLOCK_TOKENS)
    other = write_key(tmp_path / "other", seed=2)
    async with serving(folder, models, "--prefix-disk-key", str(other)) as session:
        assert await session.ask() == (cold, 0)
        log += session.server.log_path.read_text()
    assert {path.suffix for path in files_in(folder)} == {".sealed"}
    assert secret_of(1).hex() not in log
    assert "blocks are locked by another key" in log


@pytest.mark.asyncio
async def test_a_server_without_its_key_does_not_start(tmp_path: Path) -> None:
    """The file is named, and what is wrong with it; the folder is not made."""
    folder, loose = tmp_path / "prefixes", write_key(tmp_path / "loose", mode=0o640)
    kept = ("--prefix-disk", "1G", "--prefix-disk-folder", str(folder))
    for path, problem in ((loose, "is open to others"), (tmp_path / "none", "no such file")):
        address = ("--address", f"unix:{tmp_path}/s")
        refused = await mlxd("serve", *address, *kept, "--prefix-disk-key", str(path))
        assert refused.code != 0
        assert str(path) in refused.err
        assert problem in refused.err
        assert secret_of(1).hex() not in refused.err
    assert not folder.exists()
