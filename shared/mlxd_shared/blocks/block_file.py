"""One block as one file: a safetensors file whose every bit is under a checksum. Pure.

Invariants:
- The layout is safetensors': 8 bytes of header length, a JSON header, the data. The header begins
  with its checksum (BLAKE2b), at a fixed place, which covers all other bytes of length and header,
  so that nothing is parsed or believed before it has been compared. The header has a CRC-32 of each
  tensor, so every bit of the file is under a sum. Of a file that is encrypted the cipher's tag does
  that (`sealing`): its checksum is 0, it has no sums, and none is compared.
- A file says which block it is: of which form, after which name, with which tokens. Its own name
  follows from that, so one that was renamed, or comes from elsewhere, is no block of this place.
- Nothing is made before its size is known: a header has a bound, and its tensors fill the file.
- Reading makes no copies: tensors are views of the bytes that were read.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from mlxd_shared.blocks.chain import NAME_NBYTES, TOKEN_NBYTES, next_name

VERSION = 2
"""Of the file's layout."""
HEADER_NBYTES_MAX = 1 << 20
LENGTH_NBYTES = 8
AXES_MAX = 8
ALIGNMENT = 64
"""Data begins at a multiple of it."""

DTYPE_NBYTES: Mapping[str, int] = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4, "I32": 4}
"""What tensors may be of, in safetensors' words."""

_HEAD = b'{"__metadata__":{"checksum":"'
_CHECKSUM_NBYTES = 32
_SUM_FROM = LENGTH_NBYTES + len(_HEAD)
_SUM_TO = _SUM_FROM + 2 * _CHECKSUM_NBYTES
_TENSOR_SUM_NBYTES = 4
_METADATA = "__metadata__"


class Part(StrEnum):
    """What of a block a file holds."""

    ENTRIES = "entries"
    """Of the layers that keep an entry for each position: those of the block's positions."""
    STATE = "state"
    """Of the layers that keep a state: the one at the block's end."""


class Fault(StrEnum):
    """Why a file is no block."""

    TORN = "torn"
    """Shorter than stated, or not what was written."""
    FOREIGN = "foreign"
    """Another kind of file, or a block of another place."""
    OLD = "old"
    """Of another version."""
    OVERSIZED = "oversized"
    """Larger than such a block can be."""
    LOCKED = "locked"
    """Encrypted, with a key that is not at hand."""


class BlockRefused(Exception):
    """A file that is no block of the place where it was read."""

    def __init__(self, fault: Fault, problem: str) -> None:
        super().__init__(f"{fault}: {problem}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class BlockId:
    """Names one file: the block's name in the chain, and the part."""

    name: bytes
    part: Part


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array, row by row."""

    name: str
    dtype: str
    """A key of `DTYPE_NBYTES`."""
    shape: tuple[int, ...]
    content: bytes | memoryview
    """Exactly the bytes that shape and type say."""

    @property
    def nbytes(self) -> int:
        """Bytes by shape and type."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Block:
    """One part of one block, with what makes its name."""

    form_name: bytes
    before: bytes
    """The name of the block before it, or the form's."""
    tokens: bytes
    """Its own."""
    depth: int
    """How many blocks are before it."""
    part: Part
    tensors: tuple[Tensor, ...]
    name_key: bytes = field(default=b"", repr=False)
    """What names are made under where files are encrypted; empty where they are not."""
    id: BlockId = field(init=False)

    def __post_init__(self) -> None:
        """Make the name; each tensor's bytes must be as many as it says."""
        for tensor in self.tensors:
            assert len(tensor.content) == tensor.nbytes, f"{tensor.name} is not as large as it says"
        name = next_name(self.before, self.tokens, name_key=self.name_key)
        object.__setattr__(self, "id", BlockId(name, self.part))

    @property
    def nbytes(self) -> int:
        """The tensors' bytes: the file's but for its header."""
        return sum(tensor.nbytes for tensor in self.tensors)


def encode(block: Block) -> list[bytes | memoryview]:
    """Return the file's bytes in pieces, to be written one after another, or to be encrypted.

    Raises:
        ValueError: the header would be longer than `HEADER_NBYTES_MAX`.
    """
    sums = b"" if block.name_key else b"".join(_sum_of(tensor) for tensor in block.tensors)
    header = _header_of(block, sums)
    if len(header) > HEADER_NBYTES_MAX:
        raise ValueError(f"a header of {len(header)} bytes, at most {HEADER_NBYTES_MAX}")
    length = len(header).to_bytes(LENGTH_NBYTES, "little")
    contents = [tensor.content for tensor in block.tensors]
    if block.name_key:
        return [length, header, *contents]
    start, rest = header[: len(_HEAD)], header[_SUM_TO - LENGTH_NBYTES :]
    return [length, start, _checksum(length, start, rest), rest, *contents]


def decode(raw: memoryview, *, form_digits: str, wanted: BlockId, name_key: bytes = b"") -> Block:
    """Return the block that a whole file holds; its tensors are views of `raw`.

    form_digits: the form's name in hexadecimal digits, or what it begins with. name_key: of a file
    that was encrypted, and whose tag was right.

    Raises:
        BlockRefused: torn, of another version, or not the block `wanted` of this form.
    """
    block = _decode(raw, name_key)
    if not block.form_name.hex().startswith(form_digits):
        raise BlockRefused(Fault.FOREIGN, "of another model, or another form of it")
    if block.id != wanted:
        raise BlockRefused(Fault.FOREIGN, "its tokens are not those of its name")
    return block


def _decode(raw: memoryview, name_key: bytes) -> Block:
    header = _header_in(raw)
    if not name_key:
        _compare_checksum(raw, len(header))
    try:
        stated = json.loads(bytes(header))
    except (ValueError, RecursionError) as error:
        raise BlockRefused(Fault.FOREIGN, "its header is no JSON") from error
    metadata = stated.pop(_METADATA, None) if isinstance(stated, dict) else None
    if not isinstance(metadata, dict):
        raise BlockRefused(Fault.FOREIGN, "its header says nothing of a block")
    if metadata.get("version") != str(VERSION):
        raise BlockRefused(Fault.OLD, f"version {metadata.get('version')!r:.20}, not {VERSION}")
    tensors = _tensors_in(stated, raw[LENGTH_NBYTES + len(header) :])
    if not name_key:
        _compare_sums(metadata, tensors)
    return Block(
        form_name=_bytes_in(metadata, "form", NAME_NBYTES),
        before=_bytes_in(metadata, "before", NAME_NBYTES),
        tokens=_bytes_in(metadata, "tokens", None),
        depth=_depth_in(metadata),
        part=_part_in(metadata),
        tensors=tensors,
        name_key=name_key,
    )


def file_nbytes(block: Block) -> int:
    """Return how many bytes the block's file has."""
    sums = b"" if block.name_key else bytes(_TENSOR_SUM_NBYTES * len(block.tensors))
    return LENGTH_NBYTES + len(_header_of(block, sums)) + block.nbytes


def _header_of(block: Block, sums: bytes) -> bytes:
    """Return the header, without its checksum; sums: of all tensors, if they are compared."""
    metadata = {
        "checksum": "0" * (2 * _CHECKSUM_NBYTES),
        "version": str(VERSION),
        "sums": sums.hex(),
        "form": block.form_name.hex(),
        "before": block.before.hex(),
        "tokens": block.tokens.hex(),
        "depth": str(block.depth),
        "part": block.part.value,
    }
    entries: dict[str, object] = {_METADATA: metadata}
    begin = 0
    for tensor in block.tensors:
        end = begin + tensor.nbytes
        place = [begin, end]
        entries[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place
        }  # fmt: skip
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-(LENGTH_NBYTES + len(header)) % ALIGNMENT)


def _header_in(raw: memoryview) -> memoryview:
    """Return the header of a file that is as long as it says."""
    if len(raw) < _SUM_TO:
        raise BlockRefused(Fault.TORN, f"only {len(raw)} bytes long")
    length = int.from_bytes(raw[:LENGTH_NBYTES], "little")
    if raw[LENGTH_NBYTES:_SUM_FROM] != _HEAD:
        raise BlockRefused(Fault.FOREIGN, "it begins like no block")
    if not _SUM_TO - LENGTH_NBYTES <= length <= min(HEADER_NBYTES_MAX, len(raw) - LENGTH_NBYTES):
        raise BlockRefused(Fault.TORN, f"a header of {length} bytes in a file of {len(raw)}")
    return raw[LENGTH_NBYTES : LENGTH_NBYTES + length]


def _compare_checksum(raw: memoryview, header_nbytes: int) -> None:
    """Do nothing where the checksum of a file's length and header is right."""
    stop = LENGTH_NBYTES + header_nbytes
    right = _checksum(raw[:LENGTH_NBYTES], raw[LENGTH_NBYTES:_SUM_FROM], raw[_SUM_TO:stop])
    if right != bytes(raw[_SUM_FROM:_SUM_TO]):
        raise BlockRefused(Fault.TORN, "its header's checksum is not that of its bytes")


def _checksum(*pieces: bytes | memoryview) -> bytes:
    """Return the digits of length and header, without those of the checksum itself."""
    digest = blake2b(digest_size=_CHECKSUM_NBYTES, person=b"mlxd block")
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest().encode()


def _compare_sums(metadata: Mapping[str, object], tensors: Sequence[Tensor]) -> None:
    """Do nothing where the sums of all tensors are right."""
    stated = metadata.get("sums")
    for number, tensor in enumerate(tensors):
        digits = 2 * _TENSOR_SUM_NBYTES
        at = number * digits
        if not isinstance(stated, str) or stated[at : at + digits] != _sum_of(tensor).hex():
            raise BlockRefused(Fault.TORN, f"{tensor.name!r:.60} is not what was written")


def _sum_of(tensor: Tensor) -> bytes:
    return zlib.crc32(tensor.content).to_bytes(_TENSOR_SUM_NBYTES, "big")


def _bytes_in(metadata: Mapping[str, object], name: str, nbytes: int | None) -> bytes:
    """Return what the header says in hexadecimal digits: so many bytes, or some tokens."""
    value = metadata.get(name)
    try:
        content = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        content = b""
    whole = len(content) == nbytes if nbytes else len(content) % TOKEN_NBYTES == 0
    if not content or not whole:
        raise BlockRefused(Fault.FOREIGN, f"its {name} cannot be read")
    return content


def _depth_in(metadata: Mapping[str, object]) -> int:
    value = metadata.get("depth")
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 9:
        raise BlockRefused(Fault.FOREIGN, "its depth is no count")
    return int(value)


def _part_in(metadata: Mapping[str, object]) -> Part:
    try:
        return Part(str(metadata.get("part")))
    except ValueError as error:
        raise BlockRefused(Fault.FOREIGN, "of a part that is not known") from error


def _tensors_in(entries: Mapping[str, object], data: memoryview) -> tuple[Tensor, ...]:
    tensors, position = [], 0
    for name, entry in entries.items():
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        sizes, offsets = _sizes(shape), _sizes(span)
        if not isinstance(dtype, str) or dtype not in DTYPE_NBYTES or sizes is None:
            raise BlockRefused(Fault.FOREIGN, f"{name!r:.60} has no type or shape that is known")
        nbytes = math.prod(sizes) * DTYPE_NBYTES[dtype]
        if offsets != (position, position + nbytes):
            raise BlockRefused(Fault.FOREIGN, f"{name!r:.60} does not stand where it should")
        if position + nbytes > len(data):
            raise BlockRefused(Fault.TORN, f"it ends before {name!r:.60} does")
        tensors.append(Tensor(name, dtype, sizes, data[position : position + nbytes]))
        position += nbytes
    if position != len(data):
        raise BlockRefused(Fault.TORN, f"{len(data) - position} bytes belong to no tensor")
    return tuple(tensors)


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return a short list of sizes; None of anything else."""
    if not isinstance(value, list) or len(value) > AXES_MAX:
        return None
    sizes = tuple(size for size in value if type(size) is int and 0 <= size < 1 << 48)
    return sizes if len(sizes) == len(value) else None
