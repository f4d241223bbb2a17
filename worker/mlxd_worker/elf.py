"""Read the dynamic symbol names of a 64-bit little-endian ELF library: what renaming them needs."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_MAGIC: Final = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_DYNAMIC_SYMBOLS: Final = 11
_UNDEFINED: Final = 0


class ElfError(ValueError):
    """A file that is no such library, or not a whole one."""


@dataclass(frozen=True, slots=True)
class DynamicSymbols:
    """The names that a library gives and the names that it wants of others."""

    defined: frozenset[str]
    undefined: frozenset[str]


class _Header(NamedTuple):
    ident: bytes
    kind: int
    machine: int
    version: int
    entry: int
    segments_at: int
    sections_at: int
    flags: int
    header_nbytes: int
    segment_nbytes: int
    segments: int
    section_nbytes: int
    sections: int
    names_section: int


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    nbytes: int
    link: int
    info: int
    alignment: int
    entry_nbytes: int


def read_dynamic_symbols(path: Path) -> DynamicSymbols:
    """Return the dynamic symbols of the library at `path`.

    Raises:
        ElfError: it is no 64-bit little-endian ELF library, or it is cut short.
        OSError: it cannot be read.
    """
    image = path.read_bytes()
    try:
        symbols, names = _symbol_tables(image)
        entries = list(_SYMBOL.iter_unpack(symbols))
    except struct.error as error:
        raise ElfError(f"{path.name}: {error}") from error
    defined: set[str] = set()
    undefined: set[str] = set()
    for name_at, _, _, section, _, _ in entries:
        end = names.find(b"\0", name_at)
        (undefined if section == _UNDEFINED else defined).add(names[name_at:end].decode("latin-1"))
    return DynamicSymbols(frozenset(defined - {""}), frozenset(undefined - {""}))


def is_whole(path: Path) -> bool:
    """Tell whether all that the library maps lies in the file: mapping a cut one kills the process.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header = _header(file.read(_HEADER.size))
            file.seek(header.segments_at)
            table = file.read(header.segment_nbytes * header.segments)
        segments = list(_SEGMENT.iter_unpack(table))
    except (ElfError, struct.error):
        return False
    # Of a segment, the third field is its place in the file and the sixth its length there.
    return len(segments) == header.segments and all(s[2] + s[5] <= size for s in segments)


def _header(head: bytes) -> _Header:
    header = _Header(*_HEADER.unpack(head))
    if not header.ident.startswith(_MAGIC):
        raise ElfError("not a 64-bit little-endian ELF file")
    return header


def _symbol_tables(image: bytes) -> tuple[bytes, bytes]:
    """Return the dynamic symbol table and the strings that it refers to."""
    header = _header(image[: _HEADER.size])
    end = header.sections_at + header.section_nbytes * header.sections
    table = image[header.sections_at : end]
    sections = [_Section(*entry) for entry in _SECTION.iter_unpack(table)]
    for section in sections:
        if section.kind == _DYNAMIC_SYMBOLS and section.link < len(sections):
            return _content(image, section), _content(image, sections[section.link])
    raise ElfError("no dynamic symbols")


def _content(image: bytes, section: _Section) -> bytes:
    return image[section.offset : section.offset + section.nbytes]
