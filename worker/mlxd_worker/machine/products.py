"""Products of few rows at the memory's speed: our `cblas_sgemm` in front of an OpenBLAS.

`native/products.c`, built when mlxd is installed where there is a C compiler, computes products of
few rows and hands on all others. Without it everything is OpenBLAS's, as its report says.

Invariants
- Nothing stands in front that has not just agreed with what stands behind it.
- A library made from another source than the one beside it is not opened.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlxd_shared.domain.errors import BackendProblem
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.switches import SWITCHES

PRODUCTS_VARIABLE: Final = "MLXD_PRODUCTS"
SETS: Final = ("auto", "off", "avx2", "avx512", "neon")
"""What MLXD_PRODUCTS may say: the best instruction set there is, none, or one by name."""
NATIVE: Final = Path(__file__).parent / "native"
LIBRARY: Final = "libmlxd_products.so"
ROW_MAJOR: Final = 101
AS_IS: Final = 111
TRANSPOSED: Final = 112

_CHECKED: Final = ((1, 70, 40), (2, 33, 129), (5, 64, 64), (16, 19, 515), (48, 40, 100))
"""Rows, columns and inner lengths that are compared with the library behind."""
_SHARED: Final = (7, 128, 1300)
"""Large enough that all threads take part, and long enough for its rows to be cut."""
_DRAWN: Final = 1021
"""Numbers that are drawn for a check, over and over."""
_TOLERANCE: Final = 1e-6
"""For each of the products that are added, all below 1: far more than what their order changes."""


class ProductsError(Exception):
    """Why the library behind computes every product, in words for the log."""


@dataclass(frozen=True, slots=True)
class Products:
    """Our library in front of another, at work."""

    library: ctypes.CDLL
    instructions: str
    rows: int
    """Up to how many rows are computed here, where they are not very long."""

    def __str__(self) -> str:
        """Say for a report what is computed here."""
        return f"products of up to {self.rows} rows by mlxd's {self.instructions} kernels"


def read_choice(environ: Mapping[str, str]) -> str:
    """Return what MLXD_PRODUCTS asks for.

    Raises:
        BackendProblem: it is none of `SETS`.
    """
    word = environ.get(PRODUCTS_VARIABLE, "") or SETS[0]
    if word not in SETS:
        raise BackendProblem(f"{PRODUCTS_VARIABLE}={word!r} is none of {', '.join(SETS)}")
    return word


def source_digest(folder: Path) -> str:
    """Return what tells the source in `folder` from another; the build writes it into the library.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def stand_in_front(
    blas: ctypes.CDLL, *, threads: int, choice: str, folder: Path = NATIVE
) -> Products:
    """Open our library globally in front of `blas`, an OpenBLAS that is not global yet.

    Both compute with one pool of `threads` threads from then on.

    Raises:
        ProductsError: it is not wanted, not here, no kernel of it suits the processor, or it
            disagrees with `blas`. Nothing of it is in the global scope then.
    """
    if choice == "off":
        raise ProductsError(f"{PRODUCTS_VARIABLE}=off")
    path = folder / LIBRARY
    if not path.exists():
        raise ProductsError("mlxd's own kernels were not built when it was installed")
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        source = library["mlxd_products_source"]
        source.restype = ctypes.c_char_p
        if source().decode() != source_digest(folder):
            raise ProductsError(f"{path} was built from another source: install mlxd again")
    except (OSError, AttributeError) as error:
        raise ProductsError(f"{path} cannot be used: {error}") from error
    instructions = start(library, blas, threads, "" if choice == "auto" else choice)
    if not instructions:
        raise ProductsError("there are no kernels for this processor")
    products = Products(library, instructions, library["mlxd_products_rows"](ctypes.c_long(1)))
    problem = disagreement(library, blas)
    if problem is not None:
        library["mlxd_products_stop"](hand_over(blas))
        raise ProductsError(f"mlxd's {instructions} kernels are off: {problem}")
    off = library["mlxd_products_off"]
    SWITCHES.follow(lambda: off(int(not SWITCHES.is_on(FastPath.FEW_ROWS))))
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
    return products


def start(library: ctypes.CDLL, blas: ctypes.CDLL, threads: int, instructions: str) -> str:
    """Have our library compute in front of `blas`; return the instruction set, "" for none."""
    function = library["mlxd_products_start"]
    function.restype = ctypes.c_char_p
    behind = ctypes.cast(blas["cblas_sgemm"], ctypes.c_void_p)
    name: bytes = function(behind, hand_over(blas), ctypes.c_int(threads), instructions.encode())
    return name.decode()


def hand_over(blas: ctypes.CDLL) -> ctypes.c_void_p:
    """Return the function by which an OpenBLAS is told whose threads to use, null without one."""
    try:
        return ctypes.cast(blas["openblas_set_threads_callback_function"], ctypes.c_void_p)
    except AttributeError:  # it keeps threads of its own
        return ctypes.c_void_p(None)


def disagreement(ours: ctypes.CDLL, behind: ctypes.CDLL) -> str | None:
    """Return where two libraries' products differ by more than rounding, or None."""
    for shape in (*_CHECKED, _SHARED):
        rows, columns, inner = shape
        left, right = _numbers(rows * inner, seed=1), _numbers(columns * inner, seed=2)
        for order in (AS_IS, TRANSPOSED):
            one, two = (multiply(each, shape, order, left, right) for each in (ours, behind))
            worst = max(abs(x - y) for x, y in zip(one, two, strict=True))
            if not worst <= _TOLERANCE * inner:  # NaN disagrees too
                return f"{rows} x {inner} x {columns} differs by {worst:.2g} from OpenBLAS"
    return None


def multiply(
    blas: ctypes.CDLL,
    shape: tuple[int, int, int],
    order: int,
    left: array[float],
    right: array[float],
) -> array[float]:
    """Return left @ right, or left @ right.T, as `blas` does it; shape: rows, columns, inner."""
    rows, columns, inner = shape
    result = array("f", [0.0]) * (rows * columns)
    one, two, three = ((ctypes.c_float * len(a)).from_buffer(a) for a in (left, right, result))
    function = blas["cblas_sgemm"]
    function.restype = None
    function(
        *(ROW_MAJOR, AS_IS, order, rows, columns, inner, ctypes.c_float(1.0), one, inner),
        *(two, inner if order == TRANSPOSED else columns, ctypes.c_float(0.0), three, columns),
    )
    return result


def _numbers(count: int, *, seed: int) -> array[float]:
    draws = random.Random(seed)  # noqa: S311 - any numbers will do
    few = array("f", [draws.uniform(-1.0, 1.0) for _ in range(_DRAWN)])
    return (few * (count // _DRAWN + 1))[:count]
