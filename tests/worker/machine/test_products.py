"""Products of few rows: as OpenBLAS's within rounding, and a row's the same in any company."""

from __future__ import annotations

import ctypes
import platform
import shutil
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.errors import BackendProblem
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.machine.blas import preload_blas
from mlxd_worker.machine.products import (
    AS_IS,
    LIBRARY,
    NATIVE,
    PRODUCTS_VARIABLE,
    ROW_MAJOR,
    TRANSPOSED,
    ProductsError,
    disagreement,
    read_choice,
    source_digest,
    stand_in_front,
)
from tests.worker.fresh_process import environment, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS brings Accelerate")

Matrix = npt.NDArray[np.float32]
CLOSE = 2e-6
"""Of the sum of absolute products, which is what rounding is measured by."""
REPORT = """
import json
from mlxd_worker.machine.blas import preload_blas
print(json.dumps(preload_blas().reason))
"""
BITS = """
import hashlib, json, os
from mlxd_worker.machine.blas import preload_blas
reason = preload_blas().reason
import mlx.core as mx
x = mx.random.normal((8, 515), key=mx.random.key(0))
w = mx.random.normal((700, 515), key=mx.random.key(1))
def bits():
    return hashlib.sha256(bytes(memoryview(x @ w.T))).hexdigest()
"""
FORK = """
import warnings; warnings.simplefilter("ignore")
mx.eval(mx.ones((200, 300)) @ mx.ones((300, 400)))
own = bits()
import ctypes
from mlxd_worker.machine.products import *
library = ctypes.CDLL(str(NATIVE / LIBRARY))
def ones(rows):  # no MLX: its streams have no threads in a child
    out = multiply(library, (rows, 700, 520), TRANSPOSED, array("f", [1]) * (rows * 520),
        array("f", [1]) * (700 * 520))
    return set(out) == {520.0}
pid = os.fork()
if pid == 0:
    os._exit(0 if ones(8) and ones(100) and ones(8) else 1)
status = os.waitpid(pid, 0)[1]
print(json.dumps([status, ones(8), ones(100), own == bits()]))
"""


def library() -> ctypes.CDLL:
    """Return our library, at work in this process."""
    return ctypes.CDLL(str(NATIVE / LIBRARY))


def behind() -> ctypes.CDLL:
    """Return the OpenBLAS that it stands in front of."""
    return ctypes.CDLL(preload_blas().path)


def product(
    blas: ctypes.CDLL,
    left: Matrix,
    right: Matrix,
    into: Matrix,
    *,
    order: int = TRANSPOSED,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Matrix:
    """Return alpha * left @ right (or right.T) + beta * into, of matrices with any row strides."""
    result = into.copy()
    steps = [max(each.strides[0] // 4, each.shape[1], 1) for each in (left, right, into)]
    whole = np.zeros((into.shape[0], steps[2]), np.float32)
    whole[:, : into.shape[1]] = result
    pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in (left, right, whole)]
    inner = left.shape[1]
    blas["cblas_sgemm"](
        *(ROW_MAJOR, AS_IS, order, into.shape[0], into.shape[1], inner, ctypes.c_float(alpha)),
        *(pointers[0], steps[0], pointers[1], steps[1]),
        *(ctypes.c_float(beta), pointers[2], steps[2]),
    )
    return whole[:, : into.shape[1]]


def matrix(rows: int, columns: int, *, seed: int, gap: int = 0) -> Matrix:
    """Return random numbers, each row `gap` numbers apart from the next."""
    draws = np.random.default_rng(seed)
    return draws.standard_normal((rows, columns + gap), dtype=np.float32)[:, :columns]


@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(st.integers(1, 50), st.integers(1, 90), st.integers(1, 150)),
    gaps=st.tuples(*[st.integers(0, 3)] * 3),
    order=st.sampled_from([AS_IS, TRANSPOSED]),
    alpha=st.sampled_from([1.0, -0.25, 0.0]),
    beta=st.sampled_from([0.0, 1.0, 0.5]),
)
def test_it_agrees_with_what_stands_behind(
    shape: tuple[int, int, int], gaps: tuple[int, int, int], order: int, alpha: float, beta: float
) -> None:
    """Whatever the shape, the strides, the order, alpha and beta: within rounding."""
    rows, columns, inner = shape
    left = matrix(rows, inner, seed=1, gap=gaps[0])
    right = matrix(*((columns, inner) if order == TRANSPOSED else (inner, columns)),
        seed=2, gap=gaps[1])  # fmt: skip
    into = matrix(rows, columns, seed=3, gap=gaps[2])
    ours, theirs = (
        product(each, left, right, into, order=order, alpha=alpha, beta=beta)
        for each in (library(), behind())
    )
    across = right.T if order == TRANSPOSED else right
    size = abs(alpha) * (np.abs(left) @ np.abs(across)) + abs(beta) * np.abs(into)
    assert np.all(np.abs(ours - theirs) <= CLOSE * size + 1e-30)


@pytest.mark.parametrize("order", [AS_IS, TRANSPOSED])
@pytest.mark.parametrize(
    ("columns", "inner", "rows"), [(33, 70, 48), (700, 520, 48), (64, 8193, 16), (9, 8192, 48)]
)
def test_a_row_is_the_same_bit_for_bit_in_any_company(
    order: int, columns: int, inner: int, rows: int
) -> None:
    """From one row to as many as are computed here, which is known by the length of a row."""
    most = library()["mlxd_products_rows"](ctypes.c_long(inner))
    assert 16 <= most <= rows
    left = matrix(most, inner, seed=1)
    right = matrix(*((columns, inner) if order == TRANSPOSED else (inner, columns)), seed=2)
    whole = product(library(), left, right, matrix(most, columns, seed=3), order=order)
    for count in range(1, most):
        into = matrix(count, columns, seed=4)
        first = product(library(), left[:count], right, into, order=order)
        assert np.array_equal(first, whole[:count])
        last = product(library(), left[most - count :], right, into, order=order)
        assert np.array_equal(last, whole[most - count :])


def test_more_rows_are_openblass() -> None:
    """One row more than is computed here comes from behind, bit for bit; so do longer ones."""
    for inner, most in ((600, 48), (9000, 16)):
        count = library()["mlxd_products_rows"](ctypes.c_long(inner)) + 1
        assert count <= most + 1
        left, right = matrix(count, inner, seed=1), matrix(50, inner, seed=2)
        into = matrix(count, 50, seed=3)
        ours, theirs = (product(each, left, right, into) for each in (library(), behind()))
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("order", [AS_IS, TRANSPOSED])
def test_nan_goes_where_blas_says(order: int) -> None:
    """With beta = 0 the result is written without being read; NaN in a weight reaches its column.

    With alpha = 0 nothing is read; a product over no length is nothing, too.
    """
    left, right = matrix(3, 20, seed=1), matrix(20, 20, seed=2)
    into = np.full((3, 20), np.nan, np.float32)
    assert np.isfinite(product(library(), left, right, into, order=order)).all()
    assert np.isnan(product(library(), left, right, into, order=order, beta=0.5)).all()
    right[4, 4] = np.nan
    spoilt = product(library(), left, right, into, order=order)
    assert np.isnan(spoilt[:, 4]).all()
    assert np.isfinite(np.delete(spoilt, 4, axis=1)).all()
    zeros = product(library(), left, right, into, order=order, alpha=0.0)
    assert not zeros.any()
    nothing = product(library(), left[:, :0], right[:, :0], into, order=TRANSPOSED)
    assert not nothing.any()


def test_infinities_and_no_rows() -> None:
    """An infinite weight gives what arithmetic gives; no rows and no columns touch nothing."""
    left, right = matrix(2, 20, seed=1), matrix(20, 20, seed=2)
    right[7] = np.inf
    result = product(library(), left, right, np.zeros((2, 20), np.float32))
    assert not np.isfinite(result[:, 7]).any()
    empty = product(library(), left[:0], right, np.zeros((0, 20), np.float32))
    assert empty.shape == (0, 20)


def test_streams_that_multiply_at_once_share_the_pool() -> None:
    """Few rows and many, on four threads: each gets its own results, bit for bit those alone."""
    work = [(8, 700, 520), (100, 300, 200), (1, 4000, 300), (32, 90, 64)]
    made = [
        (matrix(m, k, seed=m), matrix(n, k, seed=n), np.zeros((m, n), np.float32))
        for m, n, k in work
    ]
    alone = [product(library(), *each) for each in made]
    wrong: list[int] = []

    def repeat(index: int) -> None:
        results = (product(library(), *made[index]) for _ in range(40))
        wrong.extend(index for each in results if not np.array_equal(each, alone[index]))

    threads = [Thread(target=repeat, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_switched_off_everything_is_openblass() -> None:
    """`few-rows` is a path like any other: off while a body runs, and on again."""
    left, right = matrix(5, 600, seed=1), matrix(300, 600, seed=2)
    into = np.zeros((5, 300), np.float32)
    theirs, ours = product(behind(), left, right, into), product(library(), left, right, into)
    assert not np.array_equal(ours, theirs)
    with SWITCHES.without(FastPath.FEW_ROWS):
        assert np.array_equal(product(library(), left, right, into), theirs)
    assert np.array_equal(product(library(), left, right, into), ours)


def test_a_fork_computes_with_threads_of_its_own() -> None:
    """Child and parent go on, with few rows and with many."""
    assert run(BITS + FORK, environment(MLXD_BLAS_THREADS="2")) == [0, True, True, True]


def test_the_number_of_threads_changes_no_bit() -> None:
    """One core, two, or more than there are."""
    ask = BITS + "print(json.dumps(bits()))"
    answers = {run(ask, environment(MLXD_BLAS_THREADS=count)) for count in ("1", "2", "5")}
    assert len(answers) == 1


def test_the_report_says_who_multiplies() -> None:
    """The kernels by name, or why there are none."""
    assert "rows by mlxd's" in run(REPORT, environment())
    off = run(REPORT, environment(**{PRODUCTS_VARIABLE: "off"}))
    assert f"products by OpenBLAS alone: {PRODUCTS_VARIABLE}=off" in off
    other = {"avx2": "neon", "avx512": "neon", "neon": "avx2"}
    foreign = other[run(REPORT, environment()).partition("mlxd's ")[2].split()[0]]
    absent = run(REPORT, environment(**{PRODUCTS_VARIABLE: foreign}))
    assert "OpenBLAS alone: there are no kernels for this processor" in absent


def test_without_kernels_for_the_processor_openblas_keeps_its_threads(tmp_path: Path) -> None:
    """It is told of our pool only where our products stand in front of it."""
    calls: list[int | None] = []
    hand_over = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(calls.append)
    own = ctypes.CDLL(str(shutil.copy(NATIVE / LIBRARY, tmp_path)))  # with a state of its own
    begin = own["mlxd_products_start"]
    begin.restype = ctypes.c_char_p
    behind_it = ctypes.cast(behind()["cblas_sgemm"], ctypes.c_void_p)
    assert begin(behind_it, hand_over, 1, b"none such") == b""
    assert not calls
    assert begin(behind_it, hand_over, 1, b"") != b""
    assert len(calls) == 1


def test_the_best_kernels_that_the_processor_has_are_taken(tmp_path: Path) -> None:
    """As Linux lists its instructions, without those whose registers it does not keep."""
    own = ctypes.CDLL(str(shutil.copy(NATIVE / LIBRARY, tmp_path)))  # with a state of its own
    begin = own["mlxd_products_start"]
    begin.restype = ctypes.c_char_p
    behind_it = ctypes.cast(behind()["cblas_sgemm"], ctypes.c_void_p)
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    needs = {b"avx2": {"avx2", "fma"}, b"avx512": {"avx2", "fma", "avx512f", "avx512dq"}}
    have = [name for name, wanted in needs.items() if wanted <= flags]
    if platform.machine() == "aarch64":
        have = [b"neon"]
    assert begin(behind_it, None, 1, b"") == ([b"", *have])[-1]
    for name in (*needs, b"neon"):
        assert begin(behind_it, None, 1, name) == (name if name in have else b"")


def test_an_unknown_choice_is_an_error() -> None:
    """MLXD_PRODUCTS means one of its words or is refused with them."""
    assert read_choice({}) == read_choice({PRODUCTS_VARIABLE: ""}) == "auto"
    with pytest.raises(BackendProblem, match="auto, off, avx2"):
        read_choice({PRODUCTS_VARIABLE: "fast"})


def test_a_library_that_is_not_there_or_of_another_source_is_not_used(tmp_path: Path) -> None:
    """Not built, built from an older source, or no library at all: each is said."""
    older, broken, absent = (tmp_path / name for name in ("older", "broken", "absent"))
    for folder in (older, broken, absent):
        shutil.copytree(NATIVE, folder)
    (older / "pool.h").write_text("/* changed */", encoding="ascii")
    (broken / LIBRARY).write_bytes(b"no library")
    (absent / LIBRARY).unlink()
    assert source_digest(older) != source_digest(NATIVE) == source_digest(absent)
    for folder, words in ((older, "another source"), (broken, "cannot"), (absent, "not built")):
        with pytest.raises(ProductsError, match=words):
            stand_in_front(behind(), threads=1, choice="auto", folder=folder)


def test_a_disagreement_is_seen() -> None:
    """The check at a worker's start finds a product that is off by little, or not a number."""

    class Wrong:
        """An OpenBLAS that adds something to its first result."""

        def __init__(self, fault: float) -> None:
            self.fault = fault

        def __getitem__(self, name: str) -> Any:
            def call(*arguments: Any) -> None:
                behind()[name](*arguments)
                arguments[-2][0] += self.fault

            return call

    assert disagreement(library(), behind()) is None
    for fault in (0.01, float("nan")):
        problem = disagreement(Wrong(fault), behind())  # type: ignore[arg-type]
        assert problem is not None
        assert "differs by" in problem
