"""Safetensors headers: what a whole file says, and each way in which a file can be broken."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_models.files.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorFact,
    read_header,
    read_weights,
)
from mlxd_shared.config import SAFETENSORS_HEADER_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """Return one header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}


def write(path: Path, header: Any, data_nbytes: int) -> Path:
    """Write a file of this header and so many bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_nbytes))
    return path


def error_of(path: Path) -> InvalidModel:
    """Return the error that reading `path` raises."""
    with pytest.raises(InvalidModel) as caught:
        read_header(path)
    return caught.value


def test_a_whole_file(tmp_path: Path) -> None:
    """Every tensor is told by name, type, shape, bytes and file; the metadata is none."""
    path = write(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, **GOOD}, 32)

    assert read_header(path) == (
        TensorFact("a", "F32", (2, 3), 24, path),
        TensorFact("b", "BF16", (4,), 8, path),
    )


BREACHES: dict[str, tuple[Any, int, str, str]] = {
    "truncated data": (GOOD, 31, "b", "truncated"),
    "bytes too many": (GOOD, 33, "", "belong to none"),
    "a hole": ({"a": GOOD["a"], "b": entry("BF16", [4], 26, 34)}, 34, "b", "ends at 24"),
    "an overlap": ({"a": GOOD["a"], "b": entry("BF16", [4], 20, 28)}, 28, "b", "ends at 24"),
    "shape and bytes differ": ({"a": entry("F32", [2, 2], 0, 24)}, 24, "a", "takes 16 bytes"),
    "unknown dtype": ({"a": entry("F99", [2], 0, 8)}, 8, "a", "'F99'"),
    "dtype of another kind": ({"a": entry(32, [2], 0, 8)}, 8, "a", "32"),
    "negative size": ({"a": entry("F32", [-2], 0, 8)}, 8, "a", "lists of sizes"),
    "boolean size": ({"a": entry("F32", [True], 0, 4)}, 4, "a", "lists of sizes"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "a", "lists of sizes"),
    "three offsets": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, 4, "a", "data_offsets",
    ),
    "entry not an object": ({"a": 3}, 0, "a", "not an object"),
    "header not JSON": (b"{", 0, "", "not JSON"),
    "header not UTF-8": (b'{"\xff\xfe": 1}', 0, "", "not JSON"),
    "header not an object": ([1], 0, "", "not a JSON object"),
    "header nested too deep": (b"[" * 200_000, 0, "", "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREACHES)
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    """Each contradiction is an error that names the file, the tensor and the cause."""
    header, data_nbytes, field, words = BREACHES[name]

    error = error_of(write(tmp_path / "x.safetensors", header, data_nbytes))

    assert (error.file, error.field) == ("x.safetensors", field)
    assert words in error.problem


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated: only 0 bytes"),
        (b"\x01\x02", "truncated: only 2 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: a header of 100 bytes"),
        ((SAFETENSORS_HEADER_BYTES_MAX + 1).to_bytes(8, "little"), "header claims"),
        (b"\xff" * 16, "header claims"),
    ],
)
def test_a_broken_length_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    """A header length beyond the file or the bound is refused before anything is allocated."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)

    assert words in error_of(path).problem


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file and a folder in its place are errors about that name."""
    assert error_of(tmp_path / "x.safetensors").problem == "missing"
    assert error_of(tmp_path).file == tmp_path.name


@given(st.integers(0, 1 << 20))
def test_any_cut_of_a_file_is_noticed(seed: int) -> None:
    """However many bytes are missing at the end, the file is refused."""
    raw = json.dumps(GOOD).encode()
    whole = len(raw).to_bytes(8, "little") + raw + bytes(32)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(whole[: seed % len(whole)])
        with pytest.raises(InvalidModel):
            read_header(file)


def write_shards(folder: Path, weight_map: Any, files: Mapping[str, list[str]]) -> Path:
    """Write an index and shards that hold tensors of 4 bytes."""
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    for file, names in files.items():
        header = {n: entry("F32", [1], 4 * i, 4 * i + 4) for i, n in enumerate(names)}
        write(folder / file, header, 4 * len(names))
    return folder


def test_an_index_and_its_shards(tmp_path: Path) -> None:
    """The tensors of all shards are told, each with its own file."""
    folder = write_shards(tmp_path, {"a": "1.st", "b": "2.st"}, {"1.st": ["a"], "2.st": ["b"]})

    facts = read_weights(folder).facts

    assert [(fact.name, fact.file.name) for fact in facts] == [("a", "1.st"), ("b", "2.st")]
    assert math.fsum(fact.nbytes for fact in facts) == 8


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    """One file of the usual name is a whole model; none at all is an error about that name."""
    with pytest.raises(InvalidModel, match=r"model\.safetensors: missing"):
        read_weights(tmp_path)
    write(tmp_path / SINGLE_FILE, GOOD, 32)

    assert [fact.name for fact in read_weights(tmp_path).facts] == ["a", "b"]


INDEX_BREACHES: dict[str, tuple[Any, dict[str, list[str]], str, str]] = {
    "missing shard": ({"a": "1.st"}, {}, "a", "'1.st' is missing"),
    "escaping shard": ({"a": "../1.st"}, {}, "a", "not a file name"),
    "absolute shard": ({"a": "/etc/passwd"}, {}, "a", "not a file name"),
    "parent folder": ({"a": ".."}, {}, "a", "not a file name"),
    "empty shard": ({"a": ""}, {}, "a", "not a file name"),
    "shard not a name": ({"a": 7}, {}, "a", "not a file name"),
    "map not a map": ([], {}, "weight_map", "not a map"),
    "empty map": ({}, {}, "weight_map", "not a map"),
    "tensor not in its shard": ({"a": "1.st"}, {"1.st": ["b"]}, "a", "the shards say None"),
    "tensor not in the index": ({"a": "1.st"}, {"1.st": ["a", "b"]}, "b", "the index says None"),
    "tensor in another shard": (
        {"a": "1.st", "b": "1.st"}, {"1.st": ["a"]}, "b", "the shards say None",
    ),
    "tensor stored twice": (
        {"a": "1.st", "b": "2.st"}, {"1.st": ["a"], "2.st": ["a", "b"]}, "a", "stored twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEX_BREACHES)
def test_a_broken_index_is_named(name: str, tmp_path: Path) -> None:
    """An index that disagrees with its shards, or leads out of the folder, is refused by name."""
    weight_map, files, field, words = INDEX_BREACHES[name]
    write_shards(tmp_path, weight_map, files)

    with pytest.raises(InvalidModel) as caught:
        read_weights(tmp_path)

    assert (caught.value.file, caught.value.field) == (INDEX_FILE, field)
    assert words in caught.value.problem
