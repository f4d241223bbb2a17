"""Encrypted files: what comes back, what never does, and what nobody learns without the key."""

from __future__ import annotations

import random

import pytest

from mlxd_shared.blocks.block_file import BlockRefused, Fault
from mlxd_shared.blocks.chain import name_of_form, names_of
from mlxd_shared.blocks.sealing import (
    CHUNK_NBYTES,
    HEAD_NBYTES,
    MAGIC,
    SEAL_NBYTES,
    TAG_NBYTES,
    DiskKey,
)
from tests.shared.blocks.made_blocks import FORM, filling
from tests.support.disk_keys import secret_of

KEY, OTHER = DiskKey(secret_of(1)), DiskKey(secret_of(2))
PLACE = "v1-f/n-0-entries.sealed"


def seal_bytes(content: bytes, *, place: str = PLACE, key: DiskKey = KEY) -> bytes:
    """Return the file that holds some bytes."""
    return b"".join(key.seal([content], place=place))


def open_bytes(raw: bytes, *, place: str = PLACE, key: DiskKey = KEY) -> bytes:
    """Return what a file holds."""
    return bytes(key.unseal(filling(raw), len(raw), place=place))


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_NBYTES - 1, CHUNK_NBYTES, 3 * CHUNK_NBYTES + 5])
def test_what_was_sealed_comes_back(nbytes: int) -> None:
    """Of any length, in however many pieces; the file is as much larger as is stated."""
    content = random.Random(nbytes).randbytes(nbytes)
    cut = nbytes // 3
    pieces: list[bytes | memoryview] = [content[:cut], b"", memoryview(content)[cut:]]
    raw = b"".join(KEY.seal(pieces, place=PLACE))

    assert len(raw) == nbytes + SEAL_NBYTES
    assert open_bytes(raw) == content
    assert nbytes < 16 or content[:16] not in raw


def test_no_nonce_is_used_twice() -> None:
    """The same bytes at the same place are another file each time."""
    heads = {seal_bytes(b"x" * 64)[:HEAD_NBYTES] for _ in range(1000)}
    assert len(heads) == 1000
    assert len({raw[HEAD_NBYTES:] for raw in (seal_bytes(b"x" * 64), seal_bytes(b"x" * 64))}) == 2


@pytest.mark.parametrize("bit", range(8))
def test_no_bit_can_be_changed(bit: int) -> None:
    """Head, bytes or tag: what is changed by one bit is refused, whole."""
    raw = seal_bytes(bytes(range(40)))
    for place in range(len(raw)):
        bad = bytearray(raw)
        bad[place] ^= 1 << bit
        with pytest.raises(BlockRefused):
            open_bytes(bytes(bad))


def test_a_file_is_good_at_its_place_alone() -> None:
    """One that was renamed, or moved to another form's folder, is refused."""
    raw = seal_bytes(b"tokens")
    assert open_bytes(raw) == b"tokens"
    for place in ("v1-f/n-1-entries.sealed", "v1-f/n-0-state.sealed", "v1-e/n-0-entries.sealed"):
        with pytest.raises(BlockRefused) as refused:
            open_bytes(raw, place=place)
        assert refused.value.fault is Fault.TORN


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", Fault.TORN),
        (seal_bytes(b"")[:-1], Fault.TORN),
        (seal_bytes(b"abc")[:-1], Fault.TORN),
        (seal_bytes(b"abc") + b"\0", Fault.TORN),
        (b"\0" * 200, Fault.FOREIGN),
        (seal_bytes(b"abc", key=OTHER), Fault.LOCKED),
    ],
    # What is sealed is another each time, and every process is to find tests of the same names.
    ids=("nothing", "empty-cut", "cut", "longer", "zeros", "another-key"),
)
def test_what_is_wrong_is_told_apart(raw: bytes, fault: Fault) -> None:
    """Torn, no such file, or of another key: the last is no damage."""
    with pytest.raises(BlockRefused) as refused:
        open_bytes(raw)
    assert refused.value.fault is fault


def test_a_head_that_names_our_key_opens_nothing_of_another() -> None:
    """Whoever writes our key's name into a file of another key has damaged it."""
    raw = seal_bytes(b"abc", key=OTHER)
    ours = seal_bytes(b"abc")[: HEAD_NBYTES - 12]
    with pytest.raises(BlockRefused) as refused:
        open_bytes(ours + raw[len(ours) :])
    assert refused.value.fault is Fault.TORN


def test_a_key_tells_nothing_of_itself() -> None:
    """Its text is empty; its name and what names are made under are no parts of the secret."""
    secret = secret_of(1)
    assert repr(KEY) == "DiskKey(...)" == str(KEY)
    assert KEY.id == DiskKey(secret).id != OTHER.id
    raw = seal_bytes(b"x" * 300)
    for known in (KEY.id, KEY.name_key, raw):
        assert not any(secret[at : at + 4] in known for at in range(29))
    assert raw.startswith(MAGIC)
    assert len(raw) == HEAD_NBYTES + 300 + TAG_NBYTES


def test_names_say_nothing_without_the_key() -> None:
    """A prompt has other names under each key and under none, from its first block to its last."""
    tokens = random.Random(1).randbytes(4 * 4 * 3)
    seen: set[bytes] = set()
    for name_key in (b"", KEY.name_key, OTHER.name_key):
        form = name_of_form(FORM, name_key=name_key)
        names = names_of(form, tokens, block_tokens=4, name_key=name_key)
        # Whoever knows a name cannot make the next one of it without the key.
        guessed = names_of(names[0], tokens[16:], block_tokens=4)
        assert (guessed == names[1:]) is (name_key == b"")
        seen |= {form, *names}
    assert len(seen) == 3 * 4
