"""A folder of blocks: what it keeps, and which files it throws out."""

from __future__ import annotations

import os
import random
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.blocks.about import NOBODY, About
from mlxd_shared.blocks.block_file import (
    Block,
    BlockId,
    BlockRefused,
    Fault,
    Part,
    encode,
    file_nbytes,
)
from mlxd_shared.blocks.folder import FolderRefused, open_folder, read_bytes
from mlxd_shared.blocks.store import BlockStore
from tests.shared.blocks.made_blocks import (
    AMPLE,
    FILE_NBYTES_MAX,
    chain_of,
    contents_of,
    files_in,
    open_blocks,
)
from tests.support.effort import examples

CHAIN = chain_of(1, 6)
FILE_NBYTES = file_nbytes(CHAIN[0])


def test_blocks_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    """What was written is there for the next one that opens the folder, bit for bit."""
    store = open_blocks(tmp_path / "blocks")
    assert [store.write(block) for block in CHAIN] == [True] * len(CHAIN)
    assert store.write(CHAIN[0]), "it is there already"
    assert store.counts.written == len(CHAIN)
    store.close()

    again = open_blocks(tmp_path / "blocks")
    assert (len(again), again.nbytes) == (len(CHAIN), store.nbytes)
    assert again.nbytes == sum(path.stat().st_size for path in files_in(tmp_path / "blocks"))
    for block in CHAIN:
        assert again.nbytes_of(block.id) == file_nbytes(block)
        assert contents_of(again.read(block.id)) == contents_of(block)
    assert again.read(BlockId(CHAIN[0].id.name, Part.STATE)) is None
    assert again.nbytes_of(BlockId(b"x" * 32, Part.ENTRIES)) is None
    again.close()


def test_a_read_that_gives_less_than_asked_goes_on() -> None:
    """The system may give a file in pieces; one that ends before is torn."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        for piece in (b"torn ", b"in ", b"pieces", b""):
            theirs.send(piece)
        assert read_bytes(ours.fileno(), 14) == b"torn in pieces"
        with pytest.raises(BlockRefused, match="1 bytes short"):
            read_bytes(ours.fileno(), 1)


def test_a_folder_is_its_users_alone(tmp_path: Path) -> None:
    """Made so, with all that is in it, whatever the process's mask."""
    before = os.umask(0)
    try:
        store = open_blocks(tmp_path / "a" / "blocks")
        store.write(CHAIN[0])
    finally:
        os.umask(before)
    store.close()

    (form,) = (tmp_path / "a" / "blocks").iterdir()
    for folder in (tmp_path / "a" / "blocks", form):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in form.iterdir()} == {0o600}


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    """A second store of the same form is refused until the first is closed."""
    store = open_blocks(tmp_path / "blocks")
    with pytest.raises(FolderRefused, match="another process has it"):
        open_blocks(tmp_path / "blocks")
    store.close()

    open_blocks(tmp_path / "blocks").close()


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), Fault.TORN),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), Fault.TORN),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), Fault.FOREIGN),
        (lambda path: path.write_bytes(_whole(CHAIN[1])), Fault.FOREIGN),
    ],
)
def test_a_bad_file_is_a_miss_and_goes(
    tmp_path: Path, damage: Callable[[Path], object], fault: Fault
) -> None:
    """With one line, and a count; the next read knows that it is not there."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    store.close()
    (path,) = files_in(tmp_path / "blocks")
    again = open_blocks(tmp_path / "blocks")
    damage(path)

    with capture_logs() as logs:
        assert [again.read(CHAIN[0].id) for _ in range(2)] == [None, None]

    assert [log["event"] for log in logs] == ["removed a block"]
    assert again.counts.refused == {fault: 1}
    assert (len(again), again.nbytes, files_in(tmp_path / "blocks")) == (0, 0, [])
    assert again.write(CHAIN[0])
    assert contents_of(again.read(CHAIN[0].id)) == contents_of(CHAIN[0])
    again.close()


@pytest.mark.parametrize("seed", range(examples(25, few=5)))
def test_flipped_bits_are_misses(tmp_path: Path, seed: int) -> None:
    """In 20 files each: none is read, none is left, and the other half is as it was."""
    store = open_blocks(tmp_path / "blocks")
    chain = chain_of(seed, 40)
    for block in chain:
        store.write(block)
    store.close()
    draws = random.Random(seed)
    again = open_blocks(tmp_path / "blocks")
    bad = set(draws.sample(range(40), 20))
    paths = {path.name.partition("-")[0]: path for path in files_in(tmp_path / "blocks")}
    for number in bad:
        path = paths[chain[number].id.name.hex()]
        raw = bytearray(path.read_bytes())
        raw[draws.randrange(len(raw))] ^= 1 << draws.randrange(8)
        path.write_bytes(raw)

    for number, block in enumerate(chain):
        wanted = {} if number in bad else contents_of(block)
        assert contents_of(again.read(block.id)) == wanted
    assert sum(again.counts.refused.values()) == 20
    assert len(files_in(tmp_path / "blocks")) == 20
    again.close()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Its size is known before a byte is: it goes, whoever put it there."""
    open_blocks(tmp_path / "blocks").close()
    (form,) = (tmp_path / "blocks").iterdir()
    path = form / f"{CHAIN[0].id.name.hex()}-0-entries.safetensors"
    with path.open("wb") as file:
        file.truncate(FILE_NBYTES_MAX + 1)
    store = open_blocks(tmp_path / "blocks")

    assert store.read(CHAIN[0].id) is None
    assert store.counts.refused == {Fault.OVERSIZED: 1}
    assert files_in(tmp_path / "blocks") == []
    store.close()


def test_a_file_that_has_gone_is_a_miss(tmp_path: Path) -> None:
    """Without a line: somebody made room by hand."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    files_in(tmp_path / "blocks")[0].unlink()

    with capture_logs() as logs:
        assert store.read(CHAIN[0].id) is None
    assert (logs, len(store), store.nbytes) == ([], 0, 0)
    store.close()


def test_a_sound_block_of_another_model_is_refused(tmp_path: Path) -> None:
    """What the owner's check refuses is thrown out as any other."""

    def check(block: Block) -> None:
        if block.depth == 1:
            raise BlockRefused(Fault.FOREIGN, "of other layers")

    store = open_blocks(tmp_path / "blocks", check=check)
    for block in CHAIN[:2]:
        store.write(block)

    assert contents_of(store.read(CHAIN[0].id)) == contents_of(CHAIN[0])
    assert store.read(CHAIN[1].id) is None
    assert len(files_in(tmp_path / "blocks")) == 1
    store.close()


def test_the_budget_holds(tmp_path: Path) -> None:
    """Room is made before a block is written; the least used goes, and a reopened folder obeys."""
    clock = iter(range(1000))
    folder = tmp_path / "blocks"
    store = open_blocks(folder, budget_nbytes=4 * FILE_NBYTES + 9, clock=lambda: float(next(clock)))
    for block in CHAIN[:4]:
        assert store.write(block)
    store.use(block.id for block in CHAIN[:2])

    assert store.write(CHAIN[4])

    kept = {path.name.split("-")[1] for path in files_in(folder)}
    assert store.nbytes == sum(path.stat().st_size for path in files_in(folder))
    assert store.nbytes <= store.budget_nbytes
    assert {"0", "1", "4"} <= kept
    assert store.counts.evicted == 5 - len(kept) > 0
    store.close()
    smaller = open_blocks(folder, budget_nbytes=2 * FILE_NBYTES)
    assert smaller.nbytes <= 2 * FILE_NBYTES
    assert len(files_in(folder)) == len(smaller) > 0
    smaller.close()
    empty = open_blocks(folder, budget_nbytes=0)
    assert not empty.write(CHAIN[0])
    assert (files_in(folder), empty.writable) == ([], False)
    empty.close()


def test_the_last_use_outlives_the_process(tmp_path: Path) -> None:
    """Files' times say when they were used: what was used last stays where room is short."""
    times = iter(range(1, 1000))
    store = open_blocks(tmp_path / "blocks", clock=lambda: float(next(times)))
    for block in CHAIN:
        store.write(block)
    store.use([CHAIN[0].id])
    store.read(CHAIN[1].id)
    store.close()

    again = open_blocks(tmp_path / "blocks", budget_nbytes=3 * FILE_NBYTES)
    assert again.nbytes_of(CHAIN[0].id) is not None
    assert again.nbytes_of(CHAIN[2].id) is None
    again.close()


def test_a_block_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    """Nothing is thrown out for it."""
    store = open_blocks(tmp_path / "blocks", budget_nbytes=2 * FILE_NBYTES)
    store.write(CHAIN[0])

    assert not store.write(chain_of(2, 1, values=4096)[0])
    assert len(store) == 1
    store.close()


def test_a_block_at_another_depth_is_foreign(tmp_path: Path) -> None:
    """Its layers would be put where they do not belong: a file's name says nothing on its own."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    store.close()
    (path,) = files_in(tmp_path / "blocks")
    renamed = path.rename(path.with_name(path.name.replace("-0-", "-3-")))
    again = open_blocks(tmp_path / "blocks")

    with capture_logs():
        assert again.read(CHAIN[0].id) is None
    assert (again.counts.refused, renamed.exists()) == ({Fault.FOREIGN: 1}, False)
    again.close()


def test_two_files_of_one_block_are_one(tmp_path: Path) -> None:
    """No bytes are on disk that nobody counts."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    store.close()
    (path,) = files_in(tmp_path / "blocks")
    path.with_name(path.name.replace("-0-", "-3-")).write_bytes(path.read_bytes())

    again = open_blocks(tmp_path / "blocks")

    assert len(again) == len(files_in(tmp_path / "blocks")) == 1
    assert again.nbytes == files_in(tmp_path / "blocks")[0].stat().st_size
    again.close()


def test_a_file_from_the_future_was_used_now(tmp_path: Path) -> None:
    """After a clock was put back: it goes like others, and not after all that is used since."""
    now_s = iter(range(100, 200))
    store = open_blocks(tmp_path / "blocks")
    for block in CHAIN[:2]:
        store.write(block)
    store.close()
    for path in files_in(tmp_path / "blocks"):
        used_s = 1e10 if "-0-" in path.name else 50.0
        os.utime(path, (used_s, used_s))
    again = open_blocks(
        tmp_path / "blocks", budget_nbytes=2 * FILE_NBYTES, clock=lambda: float(next(now_s))
    )

    again.use([CHAIN[1].id])
    assert again.write(CHAIN[2])

    assert again.nbytes_of(CHAIN[0].id) is None
    again.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """It is a miss and goes, with one line; what it led to stays."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    (path,) = files_in(tmp_path / "blocks")
    path.unlink()
    path.symlink_to(tmp_path)

    with capture_logs() as logs:
        assert store.read(CHAIN[0].id) is None
    assert [log["event"] for log in logs] == ["removed a block"]
    assert (len(store), tmp_path.exists(), path.is_symlink()) == (0, True, False)
    store.close()


def test_forms_stand_side_by_side(tmp_path: Path) -> None:
    """Two forms of a model share a folder, and neither sees the other's blocks."""
    store = open_blocks(tmp_path / "blocks")
    store.write(CHAIN[0])
    other = BlockStore(
        open_folder(tmp_path / "blocks", b"o" * 32),
        b"o" * 32,
        budget_nbytes=1 << 20,
        file_nbytes_max=FILE_NBYTES_MAX,
    )

    assert len(other) == 0
    assert other.write(replace(CHAIN[0], form_name=b"o" * 32))
    assert (len(store), len(other)) == (1, 1)
    store.close()
    other.close()


def _whole(block: Block) -> bytes:
    return b"".join(bytes(piece) for piece in encode(block))


def test_what_is_there_may_stay_until_there_is_a_share(tmp_path: Path) -> None:
    """Opened without a budget a store keeps what it has, and takes nothing, until it has one."""
    store = open_blocks(tmp_path / "blocks")
    blocks = chain_of(1, 3)
    assert all(store.write(block) for block in blocks[:2])
    store.close()
    held = open_blocks(tmp_path / "blocks", budget_nbytes=None)
    assert len(held) == 2
    assert held.budget_nbytes == held.nbytes
    other = chain_of(2, 1)[0]
    held.set_budget(AMPLE)
    assert held.write(other)
    held.set_budget(0)
    assert (len(held), held.nbytes) == (0, 0)
    held.close()


def test_a_folder_says_whose_it_is(tmp_path: Path) -> None:
    """By a file that no block depends on; one that is damaged says nothing, and harms nothing."""
    store = open_blocks(tmp_path / "blocks")
    about = About("m", "d", "F32", 512, "cpu", "mlx 1", 2.0)
    store.describe(about)
    (block,) = chain_of(1, 1)
    assert store.write(block)
    store.close()
    (path,) = (tmp_path / "blocks").glob("v*/about.json")
    again = open_blocks(tmp_path / "blocks")
    assert again.about == about
    again.close()
    for raw in (b"", b"[]", b"{", b'{"model": 7, "block_s": -1}', b"[" * 50_000):
        path.write_bytes(raw)
        damaged = open_blocks(tmp_path / "blocks")
        assert damaged.about == NOBODY
        assert damaged.read(block.id) is not None
        damaged.close()
