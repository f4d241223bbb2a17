"""Facts about weights from safetensors headers alone: names, types, shapes, bytes.

Invariants:
- The layout is the documented one: 8 bytes of little-endian header length, a JSON header, the data.
- A file is whole or refused: every tensor lies inside the file, has as many bytes as its shape and
  type say, overlaps none, and the tensors fill the data section to the last byte.
- A shard named by an index is a plain file name in the model's own folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxd_shared.config import SAFETENSORS_HEADER_BYTES_MAX, SHARDS_MAX
from mlxd_shared.errors import InvalidModel
from mlxd_shared.model_files import parse_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One stored tensor, as its file's header describes it; `dtype` is the header's own word."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


def read_header(path: Path) -> tuple[TensorFact, ...]:
    """Return the tensors of one safetensors file, in the order of their data.

    Raises:
        InvalidModel: missing, truncated, oversized or contradictory; names the file and the tensor.
    """
    try:
        file_nbytes = path.stat().st_size
        with path.open("rb") as stream:
            header_nbytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            _check_header_length(path, header_nbytes, file_nbytes)
            raw = stream.read(header_nbytes)
    except OSError as error:
        raise InvalidModel(_reason(error), file=path.name) from error
    data_nbytes = file_nbytes - _LENGTH_BYTES - header_nbytes
    header = parse_json_object(raw, file=path.name)
    header.pop("__metadata__", None)
    entries = [_entry(path, name, fields) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry[1], entry[2]))
    position = 0
    for fact, begin, end in entries:
        if end > data_nbytes:
            problem = f"truncated: its data ends at byte {end} of {data_nbytes} present"
            raise InvalidModel(problem, file=path.name, field=fact.name)
        if begin != position:
            problem = f"its data starts at byte {begin}, the tensor before it ends at {position}"
            raise InvalidModel(problem, file=path.name, field=fact.name)
        position = end
    if position != data_nbytes:
        problem = f"{data_nbytes - position} bytes after the last tensor belong to none"
        raise InvalidModel(problem, file=path.name)
    return tuple(fact for fact, _, _ in entries)


def read_model_dir(path: Path) -> tuple[TensorFact, ...]:
    """Return all tensors of a model's folder: one file, or an index and its shards.

    Raises:
        InvalidModel: no weights, a broken file, or an index that disagrees with its shards.
    """
    index = path / INDEX_FILE
    if not index.is_file():
        if not (path / SINGLE_FILE).is_file():
            raise InvalidModel(f"missing, and there is no {INDEX_FILE}", file=SINGLE_FILE)
        return read_header(path / SINGLE_FILE)
    placed = _read_index(index)
    shards = sorted(set(placed.values()))
    if len(shards) > SHARDS_MAX:
        problem = f"names {len(shards)} shards, at most {SHARDS_MAX} are read"
        raise InvalidModel(problem, file=INDEX_FILE)
    facts = tuple(fact for shard in shards for fact in read_header(path / shard))
    _check_index(placed, facts)
    return facts


def _check_header_length(path: Path, header_nbytes: int, file_nbytes: int) -> None:
    if file_nbytes < _LENGTH_BYTES:
        raise InvalidModel(f"truncated: only {file_nbytes} bytes long", file=path.name)
    if header_nbytes > SAFETENSORS_HEADER_BYTES_MAX:
        problem = f"its header claims {header_nbytes} bytes, over {SAFETENSORS_HEADER_BYTES_MAX}"
        raise InvalidModel(problem, file=path.name)
    if header_nbytes > file_nbytes - _LENGTH_BYTES:
        problem = f"truncated: a header of {header_nbytes} bytes in a file of {file_nbytes}"
        raise InvalidModel(problem, file=path.name)


def _entry(path: Path, name: str, fields: object) -> tuple[TensorFact, int, int]:
    if not isinstance(fields, Mapping):
        raise InvalidModel("its entry is not an object", file=path.name, field=name)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise InvalidModel(f"unknown dtype {dtype!r}", file=path.name, field=name)
    shape = _sizes(fields.get("shape"))
    span = _sizes(fields.get("data_offsets"))
    if shape is None or span is None or len(span) != 2:
        problem = "its shape or its data_offsets are not lists of sizes"
        raise InvalidModel(problem, file=path.name, field=name)
    begin, end = span
    nbytes = math.prod(shape) * _DTYPE_BITS[dtype] // 8
    if end - begin != nbytes:
        problem = f"{dtype} {list(shape)} takes {nbytes} bytes, {end - begin} are stored"
        raise InvalidModel(problem, file=path.name, field=name)
    return TensorFact(name, dtype, shape, nbytes, path), begin, end


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes = tuple(item for item in value if type(item) is int and item >= 0)
    return sizes if len(sizes) == len(value) else None


def _read_index(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > SAFETENSORS_HEADER_BYTES_MAX:
            problem = f"over {SAFETENSORS_HEADER_BYTES_MAX} bytes long"
            raise InvalidModel(problem, file=INDEX_FILE)
        raw = index.read_bytes()
    except OSError as error:
        raise InvalidModel(_reason(error), file=INDEX_FILE) from error
    weight_map = parse_json_object(raw, file=INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel("not a map of tensors to files", file=INDEX_FILE, field="weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in {"", ".", ".."}:
            problem = f"{shard!r} is not a file name inside the model's folder"
            raise InvalidModel(problem, file=INDEX_FILE, field=name)
        if not (index.parent / shard).is_file():
            raise InvalidModel(f"its shard {shard!r} is missing", file=INDEX_FILE, field=name)
    return weight_map


def _check_index(placed: Mapping[str, str], facts: tuple[TensorFact, ...]) -> None:
    seen: dict[str, str] = {}
    for fact in facts:
        if fact.name in seen:
            problem = f"stored twice, in {seen[fact.name]} and in {fact.file.name}"
            raise InvalidModel(problem, file=INDEX_FILE, field=fact.name)
        seen[fact.name] = fact.file.name
    for name in sorted(placed.keys() | seen.keys()):
        if placed.get(name) != seen.get(name):
            problem = f"the index says {placed.get(name)!r}, the shards say {seen.get(name)!r}"
            raise InvalidModel(problem, file=INDEX_FILE, field=name)


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else (error.strerror or "unreadable")
