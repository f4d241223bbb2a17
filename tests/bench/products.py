"""Products of few rows: GB/s of weights read, by mlxd's kernels and by OpenBLAS alone.

Three shapes, one in cache and two beyond it. Calls of both sides alternate in one process; OpenBLAS
by itself computes with its own threads. Beside them its sgemv, which reads a matrix as fast as
anything does here.
What is printed is the median, and the fastest call where others had the cores meanwhile.

    python -m tests.bench.products [--seconds 0.5] [--out FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mlxd_worker.machine.blas import preload_blas
from mlxd_worker.machine.products import (
    AS_IS,
    LIBRARY,
    NATIVE,
    ROW_MAJOR,
    TRANSPOSED,
    hand_over,
    start,
)
from tests.bench.report import json_line, machine, write_lines

ROWS: Final = (*range(1, 17), 32, 128, 512)
SHAPES: Final = ((512, 512), (8192, 2048), (40000, 2048))
"""Columns and inner length: of 1 MiB, 64 MiB and 312 MiB of weights."""
CALLS_MIN: Final = 5
GIGA: Final = 1e9

Call = Callable[[], None]
Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call."""

    median: float
    fastest: float


class Libraries:
    """Our kernels, and the OpenBLAS that they stand in front of."""

    def __init__(self) -> None:
        report = preload_blas()
        self.reason = f"{report.version}, {report.threads} threads: {report.reason}"
        self.ours = ctypes.CDLL(str(NATIVE / LIBRARY))
        self.behind = ctypes.CDLL(report.path)
        self._threads = report.threads

    def share_pool(self) -> None:
        """Have OpenBLAS use our pool of threads, as in a worker."""
        start(self.ours, self.behind, self._threads, "")

    def leave_pool(self) -> None:
        """Have OpenBLAS use its own threads, as by itself."""
        self.ours["mlxd_products_stop"](hand_over(self.behind))

    def product(self, library: ctypes.CDLL, x: Matrix, w: Matrix, into: Matrix) -> Call:
        """Return what computes x @ w.T into `into`."""
        (rows, inner), columns = x.shape, w.shape[0]
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        arguments = (
            *(ROW_MAJOR, AS_IS, TRANSPOSED, rows, columns, inner, one, pointer(x), inner),
            *(pointer(w), inner, zero, pointer(into), columns),
        )
        function = library["cblas_sgemm"]
        return lambda: function(*arguments)

    def vector(self, x: Matrix, w: Matrix, into: Matrix) -> Call:
        """Return what computes w @ (the first row of x) by OpenBLAS's sgemv."""
        columns, inner = w.shape
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        function = self.behind["cblas_sgemv"]
        arguments = (ROW_MAJOR, AS_IS, columns, inner, one, pointer(w), inner, pointer(x), 1)
        return lambda: function(*arguments, zero, pointer(into), 1)


def pointer(array: Matrix) -> ctypes.c_void_p:
    """Return where an array's numbers are."""
    return array.ctypes.data_as(ctypes.c_void_p)


def time_in_turn(calls: Sequence[tuple[Call, Call]], seconds: float) -> list[Times]:
    """Return the times of calls that are made in turn for so long, each after its preparation."""
    taken: list[list[float]] = [[] for _ in calls]
    for prepare, call in calls:
        prepare()
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[-1]) < CALLS_MIN:
        for (prepare, call), times in zip(calls, taken, strict=True):
            prepare()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return [Times(statistics.median(times), min(times)) for times in taken]


def measure(libraries: Libraries, columns: int, inner: int, seconds: float) -> list[str]:
    """Measure one shape for all rows; return JSON lines, and write a table."""
    draws = np.random.default_rng(0)
    w = draws.standard_normal((columns, inner), dtype=np.float32)
    lines: list[str] = []
    sys.stderr.write(f"\nweights {columns} x {inner}, {w.nbytes / 2**20:.0f} MiB\n")
    sys.stderr.write(
        "rows     ours     OpenBLAS  sgemv GB/s  ours/OpenBLAS (fastest)  ours/sgemv\n"
    )
    for rows in ROWS:
        x = draws.standard_normal((rows, inner), dtype=np.float32)
        into = np.empty((rows, columns), np.float32)
        calls = [
            (libraries.share_pool, libraries.product(libraries.ours, x, w, into)),
            (libraries.leave_pool, libraries.product(libraries.behind, x, w, into)),
            (libraries.leave_pool, libraries.vector(x, w, into)),
        ]
        ours, behind, vector = time_in_turn(calls, seconds)
        speeds = [w.nbytes / each.median / GIGA for each in (ours, behind, vector)]
        figures = {
            "ours_gb_s": speeds[0],
            "openblas_gb_s": speeds[1],
            "sgemv_gb_s": speeds[2],
            "to_openblas": speeds[0] / speeds[1],
            "to_openblas_fastest": behind.fastest / ours.fastest,
            "to_sgemv": speeds[0] / speeds[2],
        }
        sys.stderr.write(
            f"{rows:4d} {speeds[0]:10.1f} {speeds[1]:10.1f} {speeds[2]:10.1f}"
            f" {figures['to_openblas']:10.2f} ({figures['to_openblas_fastest']:.2f})"
            f" {figures['to_sgemv']:20.2f}\n"
        )
        key = f"products.{columns}x{inner}.{rows}"
        lines += [
            json_line("products", key=f"{key}.{name}", value=value)
            for name, value in figures.items()
        ]
    return lines


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number of rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    libraries = Libraries()
    sys.stderr.write(f"{libraries.reason}\n")
    lines = [json_line("machine", **machine(), products=libraries.reason)]
    for columns, inner in SHAPES:
        lines += measure(libraries, columns, inner, args.seconds)
    write_lines(lines, args.out)


if __name__ == "__main__":
    main()
