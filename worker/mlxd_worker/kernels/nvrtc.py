"""CUDA's run-time compiler, asked without MLX: source text in, machine code out.

Invariants:
- It is the library that MLX has loaded already, so both compile alike and nothing else is needed.
- Where anything is missing, the library, the toolkit's headers or the device, or the library does
  not serve the device, there is no compiler (None), and whoever asked has MLX compile instead.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import mlx.core as mx

from mlxd_shared.ops.logs import get_logger

HEADER: Final = "cuda_bf16.h"
"""What a folder of the toolkit's headers is known by."""

HEADER_FILES: Final = (HEADER, "cuda_fp16.h")
HEADERS: Final = "".join(f"#include <{header}>\n" for header in HEADER_FILES)
"""What every kernel of ours includes."""

_LIBRARY: Final = "libnvrtc.so"
_BUILTINS: Final = "libnvrtc-builtins*"
_MAPS: Final = Path("/proc/self/maps")
_PROBE: Final = f'{HEADERS}extern "C" __global__ void probe() {{}}\n'
_MAJOR, _MINOR, _SHARED_OPT_IN = 75, 76, 97
"""The driver's numbers for the two parts of a device's compute capability, and for the shared
memory that a block may ask for."""

HOPPER: Final = 90
"""A compute capability, times ten."""

_log = get_logger("kernels")


class CompileError(Exception):
    """The compiler refused a source; says what it wrote."""


class Compiler(Protocol):
    """Makes machine code: CUDA's, or a test's."""

    @property
    def toolchain(self) -> str:
        """All that decides, beside a source, what machine code becomes of it."""

    def compile(self, source: str, *, name: str) -> bytes:
        """Return the machine code of a source.

        Raises:
            CompileError: it was refused.
        """


@dataclass(frozen=True, slots=True)
class Device:
    """What a kernel must know of a CUDA device."""

    capability: int
    """Its compute capability, times ten."""
    shared_nbytes: int
    """The most shared memory that a block may have."""

    @property
    def architecture(self) -> str:
        """What the compiler calls it; Hopper with the instructions that no later device has."""
        return f"sm_{self.capability}{'a' if self.capability == HOPPER else ''}"


class Nvrtc:
    """The compiler for one architecture. Any thread."""

    def __init__(
        self, library: ctypes.CDLL, *, include: Path, architecture: str, installed: str
    ) -> None:
        """Compile with headers in `include` for an `architecture` such as sm_90.

        installed: what tells this library and these headers from any others (`describe_files`).
        """
        self._library = library
        self._options = (
            f"--gpu-architecture={architecture}".encode(),
            f"--include-path={include}".encode(),
        )
        self._toolchain = b"\n".join((*self._options, installed.encode())).decode()

    @property
    def toolchain(self) -> str:
        """The options, the architecture among them, and what is installed."""
        return self._toolchain

    def compile(self, source: str, *, name: str) -> bytes:
        """Return the machine code of a source, which messages call `name`.

        Raises:
            CompileError: it was refused.
        """
        library, program = self._library, ctypes.c_void_p()
        text, title = source.encode(), f"{name}.cu".encode()
        if library.nvrtcCreateProgram(ctypes.byref(program), text, title, 0, None, None):
            raise CompileError(f"{name}: no program could be made")
        try:
            options = (ctypes.c_char_p * len(self._options))(*self._options)
            if library.nvrtcCompileProgram(program, len(options), options):
                log = self._get(program, "ProgramLog").decode(errors="replace")
                raise CompileError(f"{name}: {log}")
            return self._get(program, "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        if getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
            raise CompileError(f"no {what}")
        held = ctypes.create_string_buffer(size.value)
        if getattr(self._library, f"nvrtcGet{what}")(program, held):
            raise CompileError(f"no {what}")
        return held.raw


@cache
def find_compiler() -> Nvrtc | None:
    """Return the compiler for MLX's default device; None where there is none. Engine thread."""
    if not mx.cuda.is_available():
        return None
    path = find_mapped(_MAPS.read_text(encoding="utf-8")) if _MAPS.exists() else None
    device = find_device()
    include = None if path is None else find_headers(path, os.environ)
    if path is None or include is None or device is None:
        _log.warning("MLX compiles the kernels", library=str(path), headers=str(include))
        return None
    return make_compiler(path, include=include, architecture=device.architecture)


def make_compiler(
    path: Path,
    *,
    include: Path,
    architecture: str,
    load: Callable[[str], ctypes.CDLL] = ctypes.CDLL,
) -> Nvrtc | None:
    """Return the compiler that a library is; None where it cannot compile even an empty kernel.

    A device that is newer than the library, or headers of which some are missing, show here and not
    in the midst of a step: a kernel with scalars is compiled by nobody else.
    """
    try:
        installed = describe_files(files_of(path, include))
        compiler = Nvrtc(
            load(str(path)), include=include, architecture=architecture, installed=installed
        )
        compiler.compile(_PROBE, name="probe")
    except (OSError, CompileError) as error:
        _log.warning("MLX compiles the kernels", library=str(path), problem=str(error))
        return None
    return compiler


def files_of(library: Path, include: Path) -> list[Path]:
    """Return the files that decide what a source becomes; any of the headers may be missing.

    Beside the library lie its built-in functions, beside a header what that includes.
    """
    headers = [include / name for name in HEADER_FILES]
    bodies = [path for header in headers if (path := header.with_suffix(".hpp")).exists()]
    return [library, *sorted(library.parent.glob(_BUILTINS)), *headers, *bodies]


def describe_files(paths: Iterable[Path]) -> str:
    """Return a line for each file: where it lies, how long it is, and when it was last changed.

    Raises:
        OSError: one is not there.
    """
    stats = ((path.resolve(), path.stat()) for path in paths)
    return "".join(f"{path} {seen.st_size} {seen.st_mtime_ns}\n" for path, seen in stats)


def find_mapped(maps: str) -> Path | None:
    """Return the compiler's library among a process's mapped files; None where it is not. Pure."""
    for line in maps.splitlines():
        path = line.rpartition(" ")[2]
        if path.rpartition("/")[2].startswith(_LIBRARY):
            return Path(path)
    return None


def find_headers(library: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the toolkit's headers: the environment's, the library's, the usual."""
    homes = [Path(home) for key in ("CUDA_HOME", "CUDA_PATH") if (home := environ.get(key))]
    # As wheels lay them out: one folder for all, or one for each part.
    beside = library.parent.parent
    homes += [beside, beside.parent / "cuda_runtime", Path("/usr/local/cuda")]
    folders = (home / "include" for home in homes)
    return next((folder for folder in folders if (folder / HEADER).is_file()), None)


@cache
def find_device() -> Device | None:
    """Return the first visible device, which is MLX's own, by the driver; None where that fails."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    values: list[int] = []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for attribute in (_MAJOR, _MINOR, _SHARED_OPT_IN):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        values.append(value.value)
    major, minor, shared_nbytes = values
    return Device(10 * major + minor, shared_nbytes)
