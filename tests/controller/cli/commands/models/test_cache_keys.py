"""`mlxd cache` on encrypted prompts: what is listed, and what is checked with the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd.v1 import model_pb2
from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.sealing import DiskKey
from tests.controller.cli.commands.models.test_cache import cache, keeping
from tests.fakes.mlxd_server import Answers, serving
from tests.shared.blocks.made_blocks import chain_of, files_in, open_blocks
from tests.support.cli import mlxd
from tests.support.disk_keys import secret_of, write_key

KEY = DiskKey(secret_of(1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three encrypted blocks of one model."""
    folder = tmp_path / "prefixes"
    store = open_blocks(folder, key=KEY)
    store.describe(About("org/kept", "0123456789abcdef", "F32", 4096, key=KEY.id.hex()))
    assert all(store.write(block) for block in chain_of(1, 3, key=KEY))
    store.close()
    return folder


@pytest.mark.asyncio
async def test_the_list_says_what_is_encrypted(folder: Path) -> None:
    """By folder; without the key."""
    listed = await cache(folder, "list")
    assert listed.rows[0][5] == "ENCRYPTED"
    assert listed.rows[1][:6] == ["org/kept", "0123456789ab", "F32", "4096", "3", "yes"]
    (stored,) = (await cache(folder, "list", "--json")).objects
    assert [each["encrypted"] for each in stored["folders"]] == [True]


@pytest.mark.asyncio
async def test_damage_is_found_with_the_key_alone(folder: Path, tmp_path: Path) -> None:
    """Without it all is counted as unchecked and stays, which is no failure; a flipped bit is one
    file less with it.
    """
    first = files_in(folder)[0]
    raw = bytearray(first.read_bytes())
    raw[len(raw) // 2] ^= 4
    first.write_bytes(raw)
    unchecked = "org/kept: 0 sound, 3 unchecked for want of their key\n"
    other = str(write_key(tmp_path / "other", seed=2))
    for words in ((), ("--prefix-disk-key", other)):
        ran = await cache(folder, "verify", *words)
        assert (ran.code, ran.out) == (0, unchecked)
    own = ("--prefix-disk-key", str(write_key(tmp_path / "key")))
    damaged = await cache(folder, "verify", *own)
    assert (damaged.code, damaged.out) == (1, "org/kept: 2 sound, 1 damaged and removed\n")
    assert (await cache(folder, "verify", *own)).code == 0


@pytest.mark.asyncio
async def test_a_loose_key_is_refused(folder: Path, tmp_path: Path) -> None:
    """The file is named, and nothing is checked."""
    loose = write_key(tmp_path / "loose", mode=0o644)
    refused = await cache(folder, "verify", "--prefix-disk-key", str(loose))
    assert refused.code != 0
    assert f"{loose}: is open to others" in refused.err
    assert refused.out == ""


@pytest.mark.asyncio
async def test_a_server_checks_with_its_own_key() -> None:
    """And says what it had none for."""
    answers = Answers(
        statuses=[keeping()],
        verified=[model_pb2.VerifyPrefixesResponse(model="m", sound=2, locked=4)],
    )
    async with serving(answers) as fake:
        checked = await mlxd("--address", fake.address, "cache", "verify")
    assert (checked.code, checked.out) == (0, "m: 2 sound, 4 unchecked for want of their key\n")
