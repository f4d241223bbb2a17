"""A file of a block comes back bit for bit, or is refused with the reason."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mlxd_shared.blocks.block_file import (
    DTYPE_NBYTES,
    HEADER_NBYTES_MAX,
    Block,
    BlockRefused,
    Fault,
    Part,
    Tensor,
    decode,
    encode,
    file_nbytes,
)
from tests.shared.blocks.made_blocks import FORM_NAME, chain_of, contents_of
from tests.support.effort import SAME_EACH_TIME, examples

BLOCK = chain_of(1, 3)[2]
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def whole(block: Block) -> bytes:
    """Return a block's file."""
    return b"".join(bytes(piece) for piece in encode(block))


def read(raw: bytes, wanted: Block = BLOCK) -> Block:
    """Read a file as the block `wanted`."""
    return decode(memoryview(raw), form_digits=wanted.form_name.hex(), wanted=wanted.id)


def reseal(raw: bytes, change: dict[str, object], *, drop: str = "") -> bytes:
    """Return a file with another header whose checksum is right: a forger's, or a bug's."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header["__metadata__"]
    for name, value in change.items():
        (metadata if name in metadata else header)[name] = value
    metadata.pop(drop, None)
    header.pop(drop, None)
    return seal(json.dumps(header, separators=(",", ":")).encode(), raw[8 + length :])


def seal(header: bytes, data: bytes) -> bytes:
    """Return a file of a header that begins as it should, under its right checksum."""
    from hashlib import blake2b  # noqa: PLC0415 - here alone

    length = len(header).to_bytes(8, "little")
    digest = blake2b(digest_size=32, person=b"mlxd block")
    at = len(b'{"__metadata__":{"checksum":"')
    for piece in (length, header[:at], header[at + 64 :]):
        digest.update(piece)
    return length + header[:at] + digest.hexdigest().encode() + header[at + 64 :] + data


@settings(max_examples=examples(100), deadline=None, derandomize=SAME_EACH_TIME)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_NBYTES)), SHAPES), max_size=5), st.data())
def test_a_block_comes_back(kinds: list[tuple[str, tuple[int, ...]]], data: st.DataObject) -> None:
    """Whatever its tensors: types, shapes, none at all, empty ones; and the size is foretold."""
    tensors = []
    for number, (dtype, shape) in enumerate(kinds):
        nbytes = Tensor("", dtype, shape, b"").nbytes
        content = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
        tensors.append(Tensor(f"t{number}", dtype, shape, content))
    block = Block(FORM_NAME, b"b" * 32, b"\0\0\0\1", 7, Part.STATE, tuple(tensors))

    raw = whole(block)

    assert len(raw) == file_nbytes(block)
    again = read(raw, block)
    assert replace(again, tensors=()) == replace(block, tensors=())
    assert contents_of(again) == contents_of(block)
    assert [(t.name, t.dtype, t.shape) for t in again.tensors] == [
        (t.name, t.dtype, t.shape) for t in block.tensors
    ]


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    """It is a safetensors file: the format's own library finds the tensors and what they are."""
    path = tmp_path / "block.safetensors"
    path.write_bytes(whole(BLOCK))

    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == {tensor.name for tensor in BLOCK.tensors}
        assert file.metadata()["part"] == "entries"
        first = BLOCK.tensors[0]
        assert file.get_tensor(first.name).tobytes() == first.content


@pytest.mark.parametrize("seed", range(examples(500, few=100)))
def test_no_bit_flips_unseen(seed: int) -> None:
    """Wherever in the file a bit is wrong, the file is refused."""
    raw = bytearray(whole(BLOCK))
    bit = random.Random(seed).randrange(8 * len(raw))
    raw[bit // 8] ^= 1 << bit % 8

    with pytest.raises(BlockRefused) as caught:
        read(bytes(raw))
    assert caught.value.fault in {Fault.TORN, Fault.FOREIGN}


def test_every_cut_is_seen() -> None:
    """A file that ends anywhere but at its end is torn, as is one with more behind it."""
    raw = whole(BLOCK)

    for cut in [raw[:length] for length in range(0, len(raw), 7)] + [raw + b"\0"]:
        with pytest.raises(BlockRefused) as caught:
            read(cut)
        assert caught.value.fault is Fault.TORN


def test_a_block_of_another_place_is_foreign() -> None:
    """A file that is sound, but another block, another part, or of another form."""
    others = [
        chain_of(2, 3)[2],
        chain_of(1, 2)[1],
        replace(BLOCK, part=Part.STATE),
        replace(BLOCK, form_name=b"x" * 32),
        replace(BLOCK, before=b"x" * 32),
        replace(BLOCK, tokens=b"\0\0\0\0"),
    ]
    for other in others:
        with pytest.raises(BlockRefused) as caught:
            read(whole(other))
        assert caught.value.fault is Fault.FOREIGN


def test_another_version_is_old() -> None:
    """A later layout, or an earlier one, is told apart from damage."""
    for version in ("0", "1", "3", ""):
        with pytest.raises(BlockRefused) as caught:
            read(reseal(whole(BLOCK), {"version": version}))
        assert caught.value.fault is Fault.OLD


@pytest.mark.parametrize(
    ("change", "drop"),
    [
        ({"depth": "-1"}, ""),
        ({"depth": "1e3"}, ""),
        ({"depth": "9" * 10}, ""),
        ({"part": "whole"}, ""),
        ({"tokens": "zz"}, ""),
        ({"tokens": "00"}, ""),
        ({"tokens": ""}, ""),
        ({"before": "00"}, ""),
        ({"form": 5}, ""),
        ({}, "tokens"),
        ({}, "standard.0.0"),
        ({"standard.0.1": []}, ""),
        ({"standard.0.1": {"dtype": "F64", "shape": [1], "data_offsets": [256, 264]}}, ""),
        ({"standard.0.1": {"dtype": "BF16", "shape": [-16], "data_offsets": [256, 288]}}, ""),
        ({"standard.0.1": {"dtype": "BF16", "shape": [True], "data_offsets": [256, 258]}}, ""),
        ({"standard.0.1": {"dtype": "BF16", "shape": [1 << 40], "data_offsets": [256, 288]}}, ""),
        ({"standard.0.1": {"dtype": "BF16", "shape": [16], "data_offsets": [0, 32]}}, ""),
        ({"standard.0.1": {"dtype": "BF16", "shape": [1] * 9, "data_offsets": [256, 258]}}, ""),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, object], drop: str) -> None:
    """Under a right checksum, too: nothing is made of sizes and names that do not fit the file."""
    raw = whole(BLOCK)
    assert contents_of(read(reseal(raw, {}))) == contents_of(BLOCK)

    with pytest.raises(BlockRefused) as caught:
        read(reseal(raw, change, drop=drop))
    assert caught.value.fault is Fault.FOREIGN


def test_every_tensor_is_under_a_sum_of_its_own() -> None:
    """Of what is not there, or not what was written, the first is named, under a right header."""
    raw = bytearray(whole(BLOCK))
    more: dict[str, object] = {"more": {"dtype": "U8", "shape": [1], "data_offsets": [292, 293]}}
    for torn, named in (
        (reseal(bytes(raw), more), "more"),
        (reseal(bytes(raw), {"sums": ""}), BLOCK.tensors[0].name),
        (reseal(bytes(raw), {"sums": 5}), BLOCK.tensors[0].name),
        (reseal(bytes(raw), {}, drop="sums"), BLOCK.tensors[0].name),
        (bytes(raw[:-1]) + bytes([raw[-1] ^ 1]), BLOCK.tensors[-1].name),
    ):
        with pytest.raises(BlockRefused, match=named) as caught:
            read(torn)
        assert caught.value.fault is Fault.TORN


@pytest.mark.parametrize(
    "rest", [b'"}', b'"},"a":' + b"[" * 100_000, b'"}}trailing', b'","version":"1"}}', b'"},"a":1}']
)
def test_a_header_that_is_none_is_refused(rest: bytes) -> None:
    """Broken, nested without end, or without what makes a block."""
    header = b'{"__metadata__":{"checksum":"' + b"0" * 64 + rest

    with pytest.raises(BlockRefused):
        read(seal(header, b""))


def test_a_header_is_bounded() -> None:
    """No more of it is read, or written, than the bound."""
    raw = bytearray(whole(BLOCK))
    raw[:8] = (HEADER_NBYTES_MAX + 1).to_bytes(8, "little")
    with pytest.raises(BlockRefused):
        read(bytes(raw) + bytes(HEADER_NBYTES_MAX))

    many = tuple(Tensor(f"{number:08}" * 10, "U8", (0,), b"") for number in range(1 << 13))
    with pytest.raises(ValueError, match="header"):
        encode(replace(BLOCK, tensors=many))
