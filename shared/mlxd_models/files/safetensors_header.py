"""The header of one safetensors file: names, types, shapes and places of its tensors.

Invariants:
- The layout is the documented one: 8 bytes of little-endian header length, a JSON header, the data.
- A file is whole or refused: every tensor lies inside the file, has as many bytes as its shape and
  type say, overlaps none, and the tensors fill the data section to the last byte.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxd_models.files.large_json import parse_large_object
from mlxd_models.files.model_files import file_error, open_regular
from mlxd_shared.config import SAFETENSORS_HEADER_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel

LENGTH_BYTES = 8
_METADATA = "__metadata__"
AXES_MAX = 32
SIZE_MAX = (1 << 63) - 1
NAME_CHARS_MAX = 1024
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
    own_name: str = field(default="", compare=False)
    """What its file calls it, where that is not `name`."""
    begin: int = field(default=0, compare=False)
    """Where in the file its data begins."""

    @property
    def stored_name(self) -> str:
        """What its file calls it."""
        return self.own_name or self.name

    def error(self, problem: str, *, field: str | None = None) -> InvalidModel:
        """Return the error about it; `field`: by another name than `name`."""
        return InvalidModel(problem, file=self.file.name, field=field or self.name)


@dataclass(frozen=True, slots=True)
class Header:
    """What the head of a file says: its tensors in the order of their data, and texts."""

    tensors: tuple[TensorFact, ...]
    metadata: Mapping[str, str]


def read_header(path: Path) -> tuple[TensorFact, ...]:
    """Return the tensors of one safetensors file, in the order of their data.

    Raises:
        InvalidModel: missing, truncated, oversized or contradictory; names the file and the tensor.
    """
    return read_whole_header(path).tensors


def read_whole_header(path: Path) -> Header:
    """Return the header of one safetensors file; raises as `read_header`."""
    try:
        with open(path, "rb", opener=open_regular) as stream:
            file_nbytes = os.fstat(stream.fileno()).st_size
            header_nbytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            _check_header_length(path, header_nbytes, file_nbytes)
            raw = stream.read(header_nbytes)
    except OSError as error:
        raise file_error(error, path.name) from error
    header = parse_large_object(raw, file=path.name)
    metadata = _metadata(path, header.pop(_METADATA, None))
    begin = LENGTH_BYTES + header_nbytes
    entries = [_entry(path, name, fields, begin) for name, fields in header.items()]
    _check_places(path, entries, file_nbytes - begin)
    return Header(tuple(fact for fact, _, _ in entries), metadata)


def _check_places(path: Path, entries: list[tuple[TensorFact, int, int]], data_nbytes: int) -> None:
    """Put the entries into the order of their data, and check that they are all of it."""
    entries.sort(key=lambda entry: (entry[1], entry[2]))
    position = 0
    for fact, begin, end in entries:
        if end > data_nbytes:
            raise fact.error(f"truncated: its data ends at byte {end} of {data_nbytes} present")
        if begin != position:
            problem = f"its data starts at byte {begin}, the tensor before it ends at {position}"
            raise fact.error(problem)
        position = end
    if position != data_nbytes:
        problem = f"{data_nbytes - position} bytes after the last tensor belong to none"
        raise InvalidModel(problem, file=path.name)


def _check_header_length(path: Path, header_nbytes: int, file_nbytes: int) -> None:
    if file_nbytes < LENGTH_BYTES:
        raise InvalidModel(f"truncated: only {file_nbytes} bytes long", file=path.name)
    if header_nbytes > SAFETENSORS_HEADER_BYTES_MAX:
        problem = f"its header claims {header_nbytes} bytes, over {SAFETENSORS_HEADER_BYTES_MAX}"
        raise InvalidModel(problem, file=path.name)
    if header_nbytes > file_nbytes - LENGTH_BYTES:
        problem = f"truncated: a header of {header_nbytes} bytes in a file of {file_nbytes}"
        raise InvalidModel(problem, file=path.name)


def _entry(path: Path, name: str, fields: object, data_begin: int) -> tuple[TensorFact, int, int]:
    if len(name) > NAME_CHARS_MAX:
        problem = f"the name of a tensor has {len(name)} characters, over {NAME_CHARS_MAX}"
        raise InvalidModel(problem, file=path.name)
    if not isinstance(fields, Mapping):
        raise InvalidModel("its entry is not an object", file=path.name, field=name)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise InvalidModel(f"unknown dtype {dtype!r:.40}", file=path.name, field=name)
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
    return TensorFact(name, dtype, shape, nbytes, path, begin=data_begin + begin), begin, end


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if len(value) > AXES_MAX:
        return None
    sizes = tuple(item for item in value if type(item) is int and 0 <= item <= SIZE_MAX)
    return sizes if len(sizes) == len(value) else None


def _metadata(path: Path, stated: object) -> Mapping[str, str]:
    if stated is None:
        return {}
    if not isinstance(stated, Mapping):
        raise InvalidModel("not an object", file=path.name, field=_METADATA)
    return {name: value for name, value in stated.items() if isinstance(value, str)}
