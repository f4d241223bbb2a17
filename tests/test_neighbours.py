"""What stands beside a test must not change it: proved on small suites that a real pytest runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PATHS = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
BYTES_COUNTED = """
import mlx.core as mx
import pytest

from tests.support.mlx_memory import live_nbytes

NBYTES = 1 << 18
MOMENTS = range(8)




@pytest.mark.parametrize("moment", MOMENTS)
def test_counts_whatever_is_alive(moment):
    array = mx.arange(NBYTES // 4)
    mx.eval(array)
    assert mx.get_active_memory() == array.nbytes


@pytest.mark.parametrize("moment", MOMENTS)
def test_counts_its_own(moment):
    before = live_nbytes()
    array = mx.arange(NBYTES // 4)
    mx.eval(array)
    assert mx.get_active_memory() - before == array.nbytes == NBYTES
    assert mx.get_peak_memory() - before == NBYTES
"""
NOTHING_COUNTED = """
import pytest

@pytest.mark.parametrize("number", range(8))
def test_runs(number):
    pass
"""


def run_suite(folder: Path, suite: str, *options: str) -> str:
    """Run a suite in a pytest of its own; return what it printed."""
    (folder / "test_suite.py").write_text(suite, encoding="utf-8")
    plugins = ["-p", "tests.plugins.neighbours", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-v", *plugins, f"--rootdir={folder}", *options, "."]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout


def order_of(output: str) -> list[str]:
    """Return the tests in the order in which they ran."""
    return re.findall(r"^test_suite.py::(\S+) PASSED", output, flags=re.MULTILINE)


def test_who_counts_others_arrays_fails(tmp_path: Path) -> None:
    """A test that takes all that is alive for its own fails wherever it runs; one that begins with
    what is there passes.
    """
    output = run_suite(tmp_path, BYTES_COUNTED, "-p", "tests.plugins.backend")

    assert "8 failed, 8 passed" in output
    assert set(re.findall(r"^FAILED \S+::(\w+)", output, flags=re.MULTILINE)) == {
        "test_counts_whatever_is_alive"
    }


def test_an_order_can_be_repeated(tmp_path: Path) -> None:
    """Each run has an order of its own, its head names the seed, and that gives the order again."""
    first = run_suite(tmp_path, NOTHING_COUNTED)
    (seed,) = re.findall(r"--randomly-seed=(\d+)", first)
    order = order_of(first)

    assert len(order) == 8
    assert order_of(run_suite(tmp_path, NOTHING_COUNTED, f"--randomly-seed={seed}")) == order
    others = {tuple(order_of(run_suite(tmp_path, NOTHING_COUNTED, f"--randomly-seed={other}")))
              for other in (1, 2)}  # fmt: skip
    assert len(others) == 2
