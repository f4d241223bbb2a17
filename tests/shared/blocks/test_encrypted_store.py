"""A folder of encrypted blocks: what it keeps, what it throws out, and what it leaves alone."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.blocks.about import About, encode_about
from mlxd_shared.blocks.block_file import Block, Fault, encode
from mlxd_shared.blocks.folder import remove_clear_folders
from mlxd_shared.blocks.listing import ABOUT_FILE
from mlxd_shared.blocks.root import RootFolder
from mlxd_shared.blocks.sealing import MAGIC, DiskKey
from tests.shared.blocks.made_blocks import (
    FORM_NAME,
    chain_of,
    contents_of,
    files_in,
    form_name_of,
    open_blocks,
)
from tests.support.disk_keys import secret_of
from tests.support.effort import examples

KEY, OTHER = DiskKey(secret_of(1)), DiskKey(secret_of(2))
CHAIN = chain_of(1, 6, key=KEY)


def fill(folder: Path, count: int = 6, *, key: DiskKey | None = KEY) -> str:
    """Leave blocks written with a key; return their folder's name."""
    before = {path.name for path in folder.glob("v*")}
    store = open_blocks(folder, key=key)
    assert all(store.write(block) for block in chain_of(1, count, key=key))
    store.close()
    (form,) = {path.name for path in folder.glob("v*")} - before
    return form


def test_blocks_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    """The next one with the key has them, bit for bit; accounts are what files take."""
    fill(tmp_path / "blocks")
    again = open_blocks(tmp_path / "blocks", key=KEY)
    files = files_in(tmp_path / "blocks")
    assert {path.suffix for path in files} == {".sealed"}
    assert again.nbytes == sum(path.stat().st_size for path in files)
    for block in CHAIN:
        assert contents_of(again.read(block.id)) == contents_of(block)
    assert not again.counts.refused
    again.close()


def secrets_of(block: Block) -> list[bytes]:
    """Return what a file in the clear has of a block: its tokens, a tensor's name, contents."""
    contents = [bytes(tensor.content)[:8] for tensor in block.tensors if tensor.nbytes >= 8]
    return [block.tokens.hex().encode(), b"standard", *contents]


def test_nothing_of_a_prompt_is_in_the_files(tmp_path: Path) -> None:
    """No tokens, no digits of them, no form's name, no tensor's name or bytes."""
    fill(tmp_path / "blocks")
    raw = b"".join(path.read_bytes() for path in files_in(tmp_path / "blocks"))
    names = "".join(path.name for path in files_in(tmp_path / "blocks"))
    clear = open_blocks(tmp_path / "clear")
    assert clear.write(chain_of(1, 6)[0])
    clear.close()
    in_clear_file = files_in(tmp_path / "clear")[0].read_bytes()
    for block, in_clear in zip(CHAIN, chain_of(1, 6), strict=True):
        assert not [secret for secret in secrets_of(block) if secret in raw]
        assert form_name_of(KEY).hex().encode() not in raw
        assert in_clear.id.name.hex() not in names
    first = secrets_of(CHAIN[0])
    assert [secret for secret in first if secret in in_clear_file] == first, (
        "it finds what is there"
    )
    assert form_name_of(None).hex().encode() in in_clear_file


@pytest.mark.parametrize("seed", range(examples(10, few=3)))
def test_flipped_bits_are_misses(tmp_path: Path, seed: int) -> None:
    """In 20 files each: none is read, each goes with a line, and the other half is as it was."""
    chain = chain_of(seed, 40, key=KEY)
    store = open_blocks(tmp_path / "blocks", key=KEY)
    assert all(store.write(block) for block in chain)
    draws = random.Random(seed)
    bad = set(draws.sample(range(40), 20))
    paths = {path.name.partition("-")[0]: path for path in files_in(tmp_path / "blocks")}
    for number in bad:
        path = paths[chain[number].id.name.hex()]
        raw = bytearray(path.read_bytes())
        raw[draws.randrange(len(raw))] ^= 1 << draws.randrange(8)
        path.write_bytes(raw)

    with capture_logs() as logs:
        for number, block in enumerate(chain):
            wanted = {} if number in bad else contents_of(block)
            assert contents_of(store.read(block.id)) == wanted
    assert [log["event"] for log in logs] == ["removed a block"] * 20
    assert len(files_in(tmp_path / "blocks")) == 20
    store.close()


def test_swapped_files_are_misses(tmp_path: Path) -> None:
    """Two sound files that have changed places, and one that says another depth."""
    store = open_blocks(tmp_path / "blocks", key=KEY)
    assert all(store.write(block) for block in CHAIN)
    paths = {path.name.partition("-")[0]: path for path in files_in(tmp_path / "blocks")}
    one, two, three = (paths[CHAIN[number].id.name.hex()] for number in range(3))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    store.close()
    three.rename(three.with_name(three.name.replace("-2-", "-5-")))
    again = open_blocks(tmp_path / "blocks", key=KEY)

    assert [again.read(block.id) for block in CHAIN[:3]] == [None] * 3
    assert again.counts.refused == {Fault.TORN: 3}
    assert contents_of(again.read(CHAIN[3].id)) == contents_of(CHAIN[3])
    again.close()


@pytest.mark.parametrize("key", [OTHER, None], ids=["another key", "no key"])
def test_another_key_finds_nothing_and_touches_nothing(tmp_path: Path, key: DiskKey | None) -> None:
    """Nor does none: they have folders of their own, and the first key's stays for it."""
    fill(tmp_path / "blocks")
    before = files_in(tmp_path / "blocks")
    store = open_blocks(tmp_path / "blocks", key=key)
    assert len(store) == 0
    own = chain_of(1, 6, key=key)
    assert [store.read(block.id) for block in (*CHAIN, *own)] == [None] * 12
    assert store.write(own[0])
    assert contents_of(store.read(own[0].id)) == contents_of(own[0])
    store.close()
    assert set(before) < set(files_in(tmp_path / "blocks"))
    again = open_blocks(tmp_path / "blocks", key=KEY)
    assert contents_of(again.read(CHAIN[0].id)) == contents_of(CHAIN[0])
    again.close()


def test_a_file_of_another_key_is_a_miss_in_our_folder(tmp_path: Path) -> None:
    """Whoever puts it there: it is no block here, and goes when it is asked for."""
    form = fill(tmp_path / "blocks", 1)
    (path,) = files_in(tmp_path / "blocks")
    place = f"{form}/{path.name}"
    path.write_bytes(b"".join(OTHER.seal(encode(CHAIN[0]), place=place)))
    store = open_blocks(tmp_path / "blocks", key=KEY)
    assert store.read(CHAIN[0].id) is None
    assert store.counts.refused == {Fault.LOCKED: 1}
    assert files_in(tmp_path / "blocks") == []
    store.close()


@pytest.mark.parametrize("key", [KEY, None], ids=["encrypted", "clear"])
def test_files_that_are_not_as_the_others_are_go(tmp_path: Path, key: DiskKey | None) -> None:
    """One in the clear among encrypted ones, or the reverse, is never read; one line says so."""
    fill(tmp_path / "blocks", 2, key=key)
    path = files_in(tmp_path / "blocks")[0]
    kind = ".safetensors" if key else ".sealed"
    path.rename(path.with_suffix(kind))

    with capture_logs() as logs:
        store = open_blocks(tmp_path / "blocks", key=key)
    event = "removed blocks in the clear" if key else "removed locked blocks"
    assert [(log["event"], log["count"]) for log in logs] == [(event, 1)]
    assert len(store) == len(files_in(tmp_path / "blocks")) == 1
    store.close()


def test_a_check_with_the_key_and_without(tmp_path: Path) -> None:
    """With it, damage is found and removed. Without it, or with another, nothing can be said: all
    is counted and stays.
    """
    form = fill(tmp_path / "blocks", 3)
    for key in (None, OTHER):
        root = RootFolder(tmp_path / "blocks", key)
        findings = root.verify(form)
        root.close()
        assert (findings.sound, findings.refused, findings.locked) == (0, {}, 3)
    path = files_in(tmp_path / "blocks")[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    root = RootFolder(tmp_path / "blocks", KEY)
    findings = root.verify(form)
    assert (findings.sound, findings.refused, findings.locked) == (2, {Fault.TORN: 1}, 0)
    assert len(files_in(tmp_path / "blocks")) == 2
    clear = fill(tmp_path / "blocks", 2, key=None)
    assert root.verify(clear).sound == 2
    root.close()


def test_a_survey_says_what_is_encrypted(tmp_path: Path) -> None:
    """By names alone, and only where all of it is; a trim needs no key."""
    form = fill(tmp_path / "blocks", 3)
    clear = fill(tmp_path / "blocks", 2, key=None)
    root = RootFolder(tmp_path / "blocks")
    assert root.survey(form).is_encrypted
    assert not root.survey(clear).is_encrypted
    path = next((tmp_path / "blocks" / form).glob("*.sealed"))
    path.rename(path.with_suffix(".safetensors"))
    assert not root.survey(form).is_encrypted
    assert root.trim(form, 0)
    assert not root.survey(form).is_encrypted
    assert not (tmp_path / "blocks" / form).exists()
    root.close()


@pytest.mark.parametrize("damage", [b"", b"no block at all" * 9], ids=["empty head", "foreign"])
def test_a_check_leaves_what_another_key_has_encrypted(tmp_path: Path, damage: bytes) -> None:
    """Its folder names its key: nothing in it can be judged, whatever a file begins with."""
    form = fill(tmp_path / "blocks", 2)
    describe(tmp_path / "blocks" / form, About(key=KEY.id.hex()))
    path = files_in(tmp_path / "blocks")[0]
    path.write_bytes(damage or b"short")
    root = RootFolder(tmp_path / "blocks", OTHER)
    findings = root.verify(form)
    root.close()
    assert (findings.refused, findings.locked) == ({}, 2)
    assert len(files_in(tmp_path / "blocks")) == 2


def test_a_check_removes_a_file_that_names_another_key_in_our_folder(tmp_path: Path) -> None:
    """A bit that was flipped in a head, where the folder says that the key is ours."""
    form = fill(tmp_path / "blocks", 2)
    describe(tmp_path / "blocks" / form, About(key=KEY.id.hex()))
    path = files_in(tmp_path / "blocks")[0]
    raw = bytearray(path.read_bytes())
    raw[len(MAGIC)] ^= 1
    path.write_bytes(raw)
    root = RootFolder(tmp_path / "blocks", KEY)
    findings = root.verify(form)
    root.close()
    assert (findings.sound, findings.refused, findings.locked) == (1, {Fault.LOCKED: 1}, 0)
    assert len(files_in(tmp_path / "blocks")) == 1


def test_a_folder_goes_unless_it_is_in_use(tmp_path: Path) -> None:
    """Of the form that is named; one that a process has stays, and none is no fault."""
    folder = tmp_path / "blocks"
    held = open_blocks(folder)
    assert held.write(chain_of(1, 1)[0])
    assert remove_clear_folders(folder, FORM_NAME, digest="d") == 0
    assert len(files_in(folder)) == 1
    held.close()
    assert remove_clear_folders(folder, FORM_NAME, digest="d") == 1
    assert remove_clear_folders(folder, FORM_NAME, digest="d") == 0
    assert list(folder.glob("v*")) == []


def test_a_model_s_folders_in_the_clear_go_whatever_their_form(tmp_path: Path) -> None:
    """Another context or form of weights is the same prompts. Other models' stay, and what is
    encrypted.
    """
    folder = tmp_path / "blocks"
    clear = folder / fill(folder, 2, key=None)
    for digits, about in (
        ("1" * 32, About(digest="d")),
        ("2" * 32, About(digest="e")),
        ("3" * 32, About(digest="d", key=OTHER.id.hex())),
    ):
        copy = clear.with_name(clear.name[:-32] + digits)
        shutil.copytree(clear, copy)
        describe(copy, about)
    assert remove_clear_folders(folder, FORM_NAME, digest="d") == 4
    assert sorted(path.name[-32:] for path in folder.glob("v*")) == ["2" * 32, "3" * 32]


def test_one_file_that_stays_keeps_no_other(tmp_path: Path) -> None:
    """What can go of a folder goes and is counted; the rest is said."""
    folder = tmp_path / "blocks"
    stays = folder / fill(folder, 3, key=None) / "a folder"
    stays.mkdir()
    with capture_logs() as logs:
        assert remove_clear_folders(folder, FORM_NAME, digest="d") == 3
    assert [(log["event"], log["left"]) for log in logs] == [("cannot remove files", 1)]
    assert files_in(folder) == []
    stays.rmdir()
    remove_clear_folders(folder, FORM_NAME, digest="d")
    assert list(folder.glob("v*")) == []


def describe(folder: Path, about: About) -> None:
    """Have a form's folder say whose it is."""
    (folder / ABOUT_FILE).write_bytes(encode_about(about))
