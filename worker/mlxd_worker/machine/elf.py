"""What renaming a library's symbols needs of its ELF file; the reading is pyelftools'.

pyelftools comes with the extra that needs it (`cpu` on Linux), so it is imported only when asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_DYNAMIC_SYMBOLS: Final = ".dynsym"
_UNDEFINED: Final = "SHN_UNDEF"


class ElfError(ValueError):
    """A file that is no ELF library, or not a whole one; or pyelftools is not there to tell."""


@dataclass(frozen=True, slots=True)
class DynamicSymbols:
    """The names that a library gives and the names that it wants of others."""

    defined: frozenset[str]
    undefined: frozenset[str]


def read_dynamic_symbols(path: Path) -> DynamicSymbols:
    """Return the dynamic symbols of the library at `path`.

    Raises:
        ElfError: it is no ELF library, has no dynamic symbols, or is cut short.
        OSError: it cannot be read.
    """
    with _open_elf(path) as library:
        table = library.get_section_by_name(_DYNAMIC_SYMBOLS)
        if table is None:
            raise ElfError(f"{path.name}: no dynamic symbols")
        named = [(s.name, s["st_shndx"]) for s in table.iter_symbols() if s.name]
    return DynamicSymbols(
        defined=frozenset(name for name, place in named if place != _UNDEFINED),
        undefined=frozenset(name for name, place in named if place == _UNDEFINED),
    )


def is_whole(path: Path) -> bool:
    """Tell whether all that the library maps lies in the file: mapping a cut one kills the process.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    try:
        with _open_elf(path) as library:
            segments = list(library.iter_segments())
    except ElfError:
        return False
    return bool(segments) and all(s["p_offset"] + s["p_filesz"] <= size for s in segments)


@contextmanager
def _open_elf(path: Path) -> Iterator[Any]:
    """Yield pyelftools' ELFFile; whatever it finds wrong with the file is an ElfError."""
    try:
        reader = importlib.import_module("elftools.elf.elffile")
        problem: type[Exception] = importlib.import_module("elftools.common.exceptions").ELFError
    except ModuleNotFoundError as error:
        raise ElfError("pyelftools is not installed") from error
    with path.open("rb") as file:
        try:
            yield reader.ELFFile(file)
        except (problem, UnicodeDecodeError) as error:
            raise ElfError(f"{path.name}: {error}") from error
