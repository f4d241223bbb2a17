"""Open a BLAS in the process's global scope, and ask it and the dynamic linker what they are."""

from __future__ import annotations

import ctypes
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.errors import BackendProblem
from mlxd_worker.machine.products import AS_IS, ProductsError, multiply, stand_in_front

PROBE_SYMBOL: Final = "cblas_sgemm"
_OWN_SYMBOL: Final = "cblas_dgemm"
"""Which nothing stands in front of."""


class BlasError(Exception):
    """Why one BLAS cannot be used here, in words for the log."""


@dataclass(frozen=True, slots=True)
class BlasReport:
    """Which BLAS the process multiplies with, and why that one."""

    name: str
    """openblas, accelerate, preloaded (somebody else put it there) or reference (MLX's own)."""
    version: str
    path: str
    threads: int
    """How many threads it uses; 0 where it does not say."""
    reason: str


class _SymbolInfo(ctypes.Structure):
    """What dladdr answers (Dl_info)."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def symbol_origin(name: str) -> str | None:
    """Return the file that gives `name` to libraries loaded from now on, or None if none does."""
    process = ctypes.CDLL(None)
    try:
        function = process[name]
    except AttributeError:
        return None
    info = _SymbolInfo()
    address = ctypes.cast(function, ctypes.c_void_p)
    if process.dladdr(address, ctypes.byref(info)) == 0 or info.file_name is None:
        return None
    return os.fsdecode(info.file_name)


def open_blas(library: str, *, threads: int, products: str, reason: str) -> BlasReport:
    """Open the OpenBLAS at `library` globally, set its threads, try it, and report on it.

    products: which kernels of ours stand in front of it (`products.SETS`).

    Raises:
        OSError: it cannot be loaded.
        BlasError: it is no OpenBLAS, or another library holds its symbols already.
        BackendProblem: it multiplies wrongly.
    """
    if (holder := symbol_origin(PROBE_SYMBOL)) is not None:
        raise BlasError(f"{holder} holds {PROBE_SYMBOL} already")
    os.environ.setdefault(config.BLAS_SPIN_VARIABLE, config.BLAS_SPIN_CYCLES_LOG2)
    blas = ctypes.CDLL(library, mode=os.RTLD_LOCAL | os.RTLD_NOW)
    try:
        blas[PROBE_SYMBOL]
        version, kernels, used = _settle(blas, threads)
    except AttributeError as error:
        raise BlasError(f"{library} is no OpenBLAS: {error}") from error
    _check_product(blas, library)
    try:
        ahead = str(stand_in_front(blas, threads=used, choice=products))
    except ProductsError as error:
        ahead = f"products by OpenBLAS alone: {error}"
    # What is global first is what MLX finds: ours stands there by now.
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
    path = symbol_origin(_OWN_SYMBOL)
    if path is None:
        raise BlasError(f"{library} has no {_OWN_SYMBOL}")
    why = f"{reason}; {ahead}; {kernels} kernels"
    return BlasReport("openblas", version, str(Path(path).resolve()), used, why)


def adopt_preloaded(origin: str, *, threads: int) -> BlasReport:
    """Set the threads of the BLAS that somebody has put there, if it is an OpenBLAS; report on it.

    MLX's calls reach it before anything that is opened now, so nothing can stand in front of it.
    """
    reason = f"{PROBE_SYMBOL} was there already; products by it alone"
    try:
        version, kernels, used = _settle(ctypes.CDLL(None), threads)
    except AttributeError:
        return BlasReport("preloaded", "", origin, 0, reason)
    reason = f"{reason}; {kernels} kernels"
    if config.BLAS_SPIN_VARIABLE not in os.environ:
        reason += f"; {config.BLAS_SPIN_VARIABLE} was not set: idle threads keep their cores busy"
    return BlasReport("preloaded", version, origin, used, reason)


def _settle(blas: ctypes.CDLL, threads: int) -> tuple[str, str, int]:
    """Set an OpenBLAS's threads; return its version, its kernels' name, and its threads."""
    set_threads, get_threads = blas["openblas_set_num_threads"], blas["openblas_get_num_threads"]
    get_config, get_kernels = blas["openblas_get_config"], blas["openblas_get_corename"]
    set_threads(ctypes.c_int(threads))
    get_config.restype = get_kernels.restype = ctypes.c_char_p
    words = get_config().decode("ascii", "replace").split()
    version = words[1] if words[:1] == ["OpenBLAS"] and len(words) > 1 else " ".join(words)
    return version, get_kernels().decode("ascii", "replace"), int(get_threads())


def _check_product(blas: ctypes.CDLL, path: str) -> None:
    """Multiply two small matrices: a library with wider integers would fail here."""
    left, right = array("f", range(1, 7)), array("f", range(7, 13))
    if multiply(blas, (2, 2, 3), AS_IS, left, right).tolist() != [58.0, 64.0, 139.0, 154.0]:
        raise BackendProblem(f"the BLAS at {path} multiplies wrongly; set MLXD_BLAS=none")
