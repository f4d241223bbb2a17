"""Encrypted prompts under an engine: the same tokens with the key, without it, and after damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxd_shared.blocks.sealing import DiskKey
from tests.shared.blocks.made_blocks import files_in
from tests.support.disk_keys import secret_of
from tests.support.kept_on_disk import disk_of, engine_with_disk
from tests.support.remembering import MEMORIES
from tests.worker.engine.test_prefix_disk import FURTHER, PROMPT, WHOLE, ask, cold_ids

KEY, OTHER = DiskKey(secret_of(1)), DiskKey(secret_of(2))


@pytest.fixture(scope="module", params=MEMORIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each kind of memory."""
    return MEMORIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the prompt, encrypted; by an engine that was killed."""
    folder = tmp_path_factory.mktemp("written") / "blocks"
    with engine_with_disk(model, folder, disk_options={"key": KEY}) as first:
        for _ in range(3):
            ask(first, PROMPT)
    assert {path.suffix for path in files_in(folder)} == {".sealed"}
    return folder


@pytest.fixture
def blocks(written: Path, tmp_path: Path) -> Path:
    """A copy of the folder, of the test's own."""
    return Path(shutil.copytree(written, tmp_path / "blocks"))


def test_with_the_key_the_beginning_is_read(model: Path, blocks: Path) -> None:
    """Of every kind of layer, with the tokens of an engine that has no memory."""
    with engine_with_disk(model, blocks, disk_options={"key": KEY}) as tiny:
        assert ask(tiny, FURTHER) == (cold_ids(model, FURTHER), WHOLE)
        assert disk_of(tiny).figures(hit_tokens=0).encrypted


@pytest.mark.parametrize("key", [OTHER, None], ids=["another key", "no key"])
def test_without_the_key_all_is_computed(model: Path, blocks: Path, key: DiskKey | None) -> None:
    """Another key, or none, finds nothing: the same tokens, and the files stay."""
    before = set(files_in(blocks))
    with engine_with_disk(model, blocks, disk_options={"key": key}) as tiny:
        assert ask(tiny, FURTHER) == (cold_ids(model, FURTHER), 0)
        assert disk_of(tiny).figures(hit_tokens=0).encrypted is (key is not None)
    assert before <= set(files_in(blocks))


def flip(folder: Path) -> None:
    """Flip a bit in each file."""
    draws = random.Random(5)
    for path in files_in(folder):
        raw = bytearray(path.read_bytes())
        raw[draws.randrange(len(raw))] ^= 1 << draws.randrange(8)
        path.write_bytes(raw)


def swap(folder: Path) -> None:
    """Have each file hold what the next one held."""
    paths = files_in(folder)
    held = [path.read_bytes() for path in paths]
    for path, raw in zip(paths, (*held[1:], held[0] + b"\0"), strict=True):
        path.write_bytes(raw)


def cut_short(folder: Path) -> None:
    """Take the end off each file."""
    for path in files_in(folder):
        path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [flip, swap, cut_short])
def test_damage_is_a_miss(model: Path, blocks: Path, damage: Callable[[Path], None]) -> None:
    """Never a wrong token, whatever was done to encrypted files."""
    damage(blocks)
    with engine_with_disk(model, blocks, disk_options={"key": KEY}) as tiny:
        assert ask(tiny, FURTHER) == (cold_ids(model, FURTHER), 0)
        assert sum(disk_of(tiny).tier.store.counts.refused.values()) > 0
