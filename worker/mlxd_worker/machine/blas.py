"""Put an optimised BLAS under MLX, in this process, before MLX is imported.

On Linux MLX's wheels bring the reference BLAS, 30 times slower than this machine can multiply. MLX
calls BLAS and LAPACK by their plain names, so whatever library holds these names in the process's
global scope when MLX is loaded is the one it uses. On macOS MLX uses Accelerate and nothing is
needed.

Invariants
- Called before MLX is imported, once a process; later calls return the first report.
- What the report says was asked of the loaded library and of the dynamic linker, not assumed.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from collections.abc import Mapping
from typing import Final

from mlxd_shared.domain.errors import BackendProblem
from mlxd_worker.machine.blas_bundle import cache_folders, ensure_library, find_wheel
from mlxd_worker.machine.blas_library import (
    PROBE_SYMBOL,
    BlasError,
    BlasReport,
    adopt_preloaded,
    open_blas,
    symbol_origin,
)
from mlxd_worker.machine.cores import available_cores
from mlxd_worker.machine.products import read_choice

CHOICE_VARIABLE: Final = "MLXD_BLAS"
THREADS_VARIABLE: Final = "MLXD_BLAS_THREADS"
SYSTEM_LIBRARY: Final = "libopenblas.so.0"
THREADS_MAX: Final = 1024


class BlasChoice(enum.Enum):
    """Which BLAS to put under MLX."""

    AUTO = "auto"
    """The first of bundled and system that works; what somebody preloaded goes before both."""
    BUNDLED = "bundled"
    SYSTEM = "system"
    NONE = "none"
    """MLX's own."""


_lock = threading.Lock()
_done: list[BlasReport] = []


def preload_blas(environ: Mapping[str, str] = os.environ) -> BlasReport:
    """Load the BLAS that MLXD_BLAS (auto, bundled, system, none) asks for; return what is in use.

    MLXD_BLAS_THREADS sets its threads, else OPENBLAS_NUM_THREADS, else the cores that this process
    may use. MLXD_PRODUCTS says which kernels of our own compute products of few rows in front of an
    OpenBLAS (auto, off, or an instruction set). With auto, what does not work is passed over and
    named in the report's reason.

    Raises:
        BackendProblem: MLX was imported already, a variable is malformed, or what was asked for by
            name does not work here.
    """
    with _lock:
        if not _done:
            _done.append(_preload(environ))
        return _done[0]


def _preload(environ: Mapping[str, str]) -> BlasReport:
    choice, threads, products = _choice(environ), _threads(environ), read_choice(environ)
    if "mlx.core" in sys.modules:
        raise BackendProblem("MLX was imported before preload_blas(); call it first")
    if sys.platform == "darwin":
        return BlasReport("accelerate", "", "", 0, "macOS brings it and MLX is built on it")
    if choice is BlasChoice.NONE:
        return _reference(f"{CHOICE_VARIABLE}=none")
    if sys.platform != "linux":
        return _reference(f"not done on {sys.platform}")
    try:
        if choice is BlasChoice.BUNDLED:
            return _load_bundled(environ, threads, products, "as asked for")
        if choice is BlasChoice.SYSTEM:
            return _system(threads, products, "as asked for")
    except BlasError as error:
        message = f"{CHOICE_VARIABLE}={choice.value} does not work here: {error}"
        raise BackendProblem(message) from error
    return _auto(environ, threads, products)


def _auto(environ: Mapping[str, str], threads: int, products: str) -> BlasReport:
    """Use what is preloaded, else bundled, else the system's, else MLX's own."""
    origin = symbol_origin(PROBE_SYMBOL)
    if origin is not None:
        return adopt_preloaded(origin, threads=threads)
    reasons: list[str] = []
    try:
        return _load_bundled(environ, threads, products, "the bundled one comes first")
    except BlasError as error:
        reasons.append(f"bundled: {error}")
    try:
        return _system(threads, products, reasons[0])
    except BlasError as error:
        reasons.append(f"system: {error}")
    return _reference("; ".join(reasons))


def _load_bundled(
    environ: Mapping[str, str], threads: int, products: str, reason: str
) -> BlasReport:
    """Load the bundled library from the first cache folder where that works."""
    wheel = find_wheel()
    failures: list[str] = []
    for folder in cache_folders(environ):
        try:
            path = ensure_library(wheel, folder)
            why = "; ".join([reason, *failures])
            return open_blas(str(path), threads=threads, products=products, reason=why)
        except (OSError, BlasError) as error:
            failures.append(f"not in {folder}: {error}")
    raise BlasError("; ".join(failures))


def _system(threads: int, products: str, reason: str) -> BlasReport:
    try:
        return open_blas(SYSTEM_LIBRARY, threads=threads, products=products, reason=reason)
    except OSError as error:
        raise BlasError(str(error)) from error


def _reference(reason: str) -> BlasReport:
    return BlasReport("reference", "", "", 1, reason)


def _choice(environ: Mapping[str, str]) -> BlasChoice:
    word = environ.get(CHOICE_VARIABLE, "") or BlasChoice.AUTO.value
    try:
        return BlasChoice(word)
    except ValueError as error:
        words = ", ".join(choice.value for choice in BlasChoice)
        raise BackendProblem(f"{CHOICE_VARIABLE}={word!r} is none of {words}") from error


def _threads(environ: Mapping[str, str]) -> int:
    for variable in (THREADS_VARIABLE, "OPENBLAS_NUM_THREADS"):
        word = environ.get(variable, "")
        if word:
            if not (word.isascii() and word.isdigit() and 1 <= int(word) <= THREADS_MAX):
                raise BackendProblem(f"{variable}={word!r} is not within 1 and {THREADS_MAX}")
            return int(word)
    return available_cores()
